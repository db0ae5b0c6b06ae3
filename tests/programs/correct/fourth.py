"""Correct programs of methods of research that come near to checks, written when all checks were there."""

import copy
import math

import torch
from programs import (
    Base,
    Causal,
    LossOnly,
    Manual,
    Table,
    diabetes,
    digits,
    halves,
    mlp,
    no_bug,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


@no_bug()
def penalized_critic():
    """A critic with a gradient penalty at real samples, within automatic optimization."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))

        def loss(self, x, y):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                score = self.net(x)[:, 0]
                (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = F.binary_cross_entropy_with_logits(score, (y > 4).float())
            return loss + 0.1 * grad.flatten(1).square().sum(1).mean()

    return M(), *digits()


@no_bug()
def discrete_latents():
    """A variational autoencoder of discrete latents, trained by the score function with a baseline."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 8), nn.Sequential(nn.Linear(8, 64))

        def loss(self, x, y):
            posterior = Bernoulli(logits=self.encoder(x))
            z = posterior.sample()
            cost = F.binary_cross_entropy_with_logits(self.decoder(z), x.flatten(1), reduction="none").sum(1)
            signal = (cost - cost.mean()).detach()
            kl = (posterior.logits.sigmoid() - 0.5).square().sum(1)
            return (cost + signal * posterior.log_prob(z).sum(1) + kl).mean()

    return M(), *digits()


@no_bug()
def guided_diffusion():
    """A diffusion model of velocities, whose label is left out at random."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.label = nn.Sequential(nn.Linear(73, 64), nn.SiLU(), nn.Linear(64, 64)), nn.Embedding(11, 8)

        def loss(self, x, y):
            x, noise, t = x.flatten(1) * 2 - 1, torch.randn(len(x), 64), torch.rand(len(x), 1)
            a, b = (t * math.pi / 2).cos(), (t * math.pi / 2).sin()
            y = torch.where(torch.rand(len(x)) < 0.1, 10, y)
            out = self.net(torch.cat([a * x + b * noise, t, self.label(y)], 1))
            return F.mse_loss(out, a * noise - b * x)

    return M(), *digits()


@no_bug()
def queue_of_keys():
    """Contrastive learning with a queue and a momentum encoder that is averaged after each batch."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = mlp(64, 32, 16)
            self.key_encoder = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))
            self.place = 0

        def training_step(self, batch, batch_idx):
            x = batch[0]
            with torch.no_grad():
                k = F.normalize(self.key_encoder(noisy(x)), dim=1)
            q = F.normalize(self.net(noisy(x)), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T.clone()], 1) / 0.2
            self.queue[self.place : self.place + len(k)] = k
            self.place = (self.place + 32) % 128
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for p, q in zip(self.key_encoder.parameters(), self.net.parameters(), strict=True):
                    p.lerp_(q, 0.01)

        def validation_step(self, batch, batch_idx):
            self.log("val/norm", self.net(batch[0]).norm())

    return M(), *digits()


@no_bug()
def novelty_by_random_network():
    """A predictor learns the outputs of a random network, which is never trained."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.target_network = mlp(64, 32, 8), mlp(64, 32, 8).requires_grad_(False)

        def loss(self, x, y):
            return F.mse_loss(self.net(x), self.target_network(x))

    return M(), *digits()


@no_bug()
def anchored_to_the_start():
    """A penalty on the distance to the initial weights, which a frozen copy keeps."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.initial = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            pairs = zip(self.net.parameters(), self.initial.parameters(), strict=True)
            return self.loss(*batch) + 0.01 * sum((p - q).square().sum() for p, q in pairs)

    return M(), *digits()


@no_bug()
def learned_step_sizes():
    """Quantization-aware training: learned scales, a straight-through function, statistics in training only."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Quantize(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Parameter(torch.tensor(0.05))
            self.register_buffer("high", torch.ones(()))

        def forward(self, x):
            if self.training:
                self.high.lerp_(x.detach().abs().max(), 0.1)
            return Round.apply((x / self.step).clamp(-127, 127)) * self.step

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), Quantize(), nn.Linear(64, 10))

    return M(), *digits()


@no_bug()
def shared_random_factors():
    """Adapters with frozen random factors, of which only vectors are learned, one of them from 0."""

    class Adapter(nn.Module):
        def __init__(self, base, down, up):
            super().__init__()
            self.base, self.down, self.up = base.requires_grad_(False), down, up
            self.d, self.b = nn.Parameter(torch.full((16,), 0.1)), nn.Parameter(torch.zeros(64))

        def forward(self, x):
            return self.base(x) + (x @ self.down.T * self.d) @ self.up.T * self.b

    class M(Base):
        def network(self):
            down, up = nn.Parameter(torch.randn(16, 64) / 8, False), nn.Parameter(torch.randn(64, 16) / 4, False)
            layers = [Adapter(nn.Linear(64, 64), down, up) for _ in range(2)]
            return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(64, 10))

    return M(), *digits()


@no_bug()
def actor_with_entropy():
    """A contextual bandit: log-probabilities of drawn actions, a value and an entropy."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.policy, self.value = mlp(64, 32, 32), nn.Linear(32, 10), nn.Linear(32, 1)

        def loss(self, x, y):
            h = self.net(x).relu()
            policy, value = Categorical(logits=self.policy(h)), self.value(h)[:, 0]
            action = policy.sample()
            reward = (action == y).float()
            advantage = (reward - value).detach()
            actor = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
            return actor + F.mse_loss(value, reward)

    return M(), *digits()


@no_bug()
def weights_of_tasks_by_gradients():
    """GradNorm: weights of two losses, with an optimizer of their own, by manual optimization."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.side, self.weights = nn.Linear(64, 1), nn.Parameter(torch.ones(2))

        def training_step(self, batch, batch_idx):
            (x, y), (opt, opt_w) = batch, self.optimizers()
            h = self.net[:3](x)
            losses = torch.stack([F.cross_entropy(self.net[3](h), y), F.l1_loss(self.side(h)[:, 0], y / 9)])
            shared = self.net[1].weight
            norms = [
                torch.autograd.grad(w * each, shared, create_graph=True, retain_graph=True)[0].norm()
                for w, each in zip(self.weights, losses, strict=True)
            ]
            balance = (torch.stack(norms) - torch.stack(norms).mean().detach()).abs().sum()
            (self.weights.grad,) = torch.autograd.grad(balance, self.weights, retain_graph=True)
            opt.zero_grad()
            self.manual_backward((self.weights.detach() * losses).sum())
            opt.step()
            opt_w.step()
            with torch.no_grad():
                self.weights.mul_(2 / self.weights.sum())

        def configure_optimizers(self):
            main = torch.optim.Adam([*self.net.parameters(), *self.side.parameters()], 1e-2)
            return [main, torch.optim.SGD([self.weights], 1e-2)]

    return M(), *digits()


@no_bug()
def reptile():
    """Meta-learning whose gradient is the difference to a copy that was trained."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            x, y = batch
            fast = copy.deepcopy(self.net)
            inner = torch.optim.SGD(fast.parameters(), 0.1)
            for _ in range(3):
                inner.zero_grad()
                F.cross_entropy(fast(x), y).backward()
                inner.step()
            outer = self.optimizers()
            outer.zero_grad()
            for p, q in zip(self.net.parameters(), fast.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            outer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.5)

    return M(), *digits()


@no_bug()
def encoder_of_the_past():
    """Forecasts with an encoder that reads the past in both directions, and a decoder of what follows."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.past, self.net = nn.GRU(5, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4 * 5)

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch[0]))

        def loss(self, x):
            out = self.net(self.past(x[:, :8])[0][:, -1]).view(len(x), 4, 5)
            return F.mse_loss(out, x[:, 8:])

    return M(), *halves(*sequences())


@no_bug()
def next_values_by_gru():
    """Forecasts the next value at each time with a network of one direction."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 32, batch_first=True), nn.Linear(32, 5)

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch[0]))

        def loss(self, x):
            return F.mse_loss(self.net(self.rnn(x[:, :-1])[0]), x[:, 1:])

    return M(), *halves(*sequences())


@no_bug()
def filled_gaps():
    """A series is restored where it was masked, by a network of both directions."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 16, batch_first=True, bidirectional=True), nn.Linear(32, 5)

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch[0]))

        def loss(self, x):
            hidden = torch.rand(x.shape[:2]) < 0.3
            out = self.net(self.rnn(x.masked_fill(hidden[..., None], 0))[0])
            return F.mse_loss(out[hidden], x[hidden])

    return M(), *halves(*sequences())


@no_bug()
def risk_sets_sorted():
    """Cox regression, whose batch is sorted by time first."""

    class M(Table):
        def loss(self, x, y):
            order = y.argsort(descending=True)
            risk, event = self(x[order])[:, 0], (y[order] < 0.5).float()
            return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    return M(), *diabetes()


@no_bug()
def ctc_with_last_blank():
    """CTC whose blank is the last output, with targets in one row."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 5)

        def loss(self, x, y):
            log_p = self.net(self.rnn(x)[0]).log_softmax(2).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), y.shape[1])
            return F.ctc_loss(log_p, y.flatten(), *lengths, blank=4, zero_infinity=True)

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (320, 4), generator=g)
    x = F.one_hot(y.repeat_interleave(3, 1), 4).float() + torch.randn(320, 12, 4, generator=g) * 0.2
    return M(), *halves(x, y, split=256)


@no_bug()
def padding_masked_by_hand():
    """A language model of padded sequences, whose losses are multiplied by a mask."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32, padding_idx=0)

        def training_step(self, batch, batch_idx):
            x, y = batch[:, :-1], batch[:, 1:]
            each = F.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="none")
            mask = (y != 0).flatten().float()
            return (each * mask).sum() / mask.sum()

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    rows = tokens().clamp(min=1)
    length = torch.randint(6, 16, (len(rows), 1), generator=torch.Generator().manual_seed(0))
    return M(), *halves(rows.masked_fill(torch.arange(16) >= length, 0))


@no_bug()
def ends_with_padding_token():
    """A language model whose padding is the token that ends a sequence, which is learned once."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32, padding_idx=0)

        def training_step(self, batch, batch_idx):
            x, y = batch[:, :-1], batch[:, 1:].clone()
            y[x == 0] = -100
            return self.loss(x, y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    rows = tokens().clamp(min=1)
    length = torch.randint(6, 16, (len(rows), 1), generator=torch.Generator().manual_seed(0))
    return M(), *halves(rows.masked_fill(torch.arange(16) >= length, 0))


@no_bug()
def two_experts_of_four():
    """The two best experts, weighted by a noisy gate, with a balance of their load."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.gate = nn.Linear(32, 10), nn.Linear(64, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(64, 32) for _ in range(4))

        def loss(self, x, y):
            x = x.flatten(1)
            scores = self.gate(x) + (0.1 * torch.randn(len(x), 4) if self.training else 0)
            best, index = scores.topk(2, 1)
            weights = torch.zeros_like(scores).scatter(1, index, best.softmax(1))
            h = torch.stack([expert(x) for expert in self.experts], 1)
            load = weights.gt(0).float().mean(0)
            balance = 4 * (load * scores.softmax(1).mean(0)).sum()
            return F.cross_entropy(self.net((weights[..., None] * h).sum(1).relu()), y) + 0.01 * balance

    return M(), *digits()


@no_bug()
def hinge_gan_with_spectral_norm():
    """A discriminator with spectral normalization, several of its steps for one of the generator."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            norm = nn.utils.parametrizations.spectral_norm
            self.net = nn.Sequential(norm(nn.Linear(64, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 1)))
            self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            real, (opt_g, opt_d) = batch[0].flatten(1), self.optimizers()
            fake = self.generator(torch.randn(len(real), 8))
            d_loss = (1 - self.net(real)).relu().mean() + (1 + self.net(fake.detach())).relu().mean()
            opt_d.zero_grad()
            self.manual_backward(d_loss)
            opt_d.step()
            if batch_idx % 3 == 0:
                opt_g.zero_grad()
                self.manual_backward(-self.net(fake).mean())
                opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3, (0.0, 0.9)) for part in (self.generator, self.net)]

    return M(), *digits()


@no_bug()
def features_by_hooks():
    """A loss of features, which hooks collect that are removed after each pass."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), mlp().requires_grad_(False)

        def features(self, x):
            found = []
            handles = [m.register_forward_hook(lambda m, i, out: found.append(out)) for m in self.judge[1::2]]
            self.judge(x)
            for handle in handles:
                handle.remove()
            return found

        def loss(self, x, y):
            pairs = zip(self.features(self.net(noisy(x))), self.features(x), strict=True)
            return sum(F.l1_loss(a, b.detach()) for a, b in pairs)

    return M(), *digits()


@no_bug()
def checkpointed_blocks():
    """Blocks with checkpoints of both kinds, after a layer that makes inputs with gradients."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(64, 64), mlp(64, 32, 64), mlp(64, 32, 64)
            self.net = nn.Linear(64, 10)

        def forward(self, x):
            x = self.first(x.flatten(1))
            x = checkpoint(self.a, x, use_reentrant=False)
            x = checkpoint(self.b, x, use_reentrant=True) if self.training else self.b(x)
            return self.net(x)

    return M(), *digits()


@no_bug()
def soft_dice_and_cross_entropy():
    """Segmentation with a soft dice loss; the dice of predicted classes is only logged."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

        def loss(self, x, y):
            out = self(x)
            t = F.one_hot(y, 3).movedim(3, 1).float()
            hard, soft = F.one_hot(out.argmax(1), 3).movedim(3, 1).float(), out.softmax(1)
            self.log("dice", 2 * (hard * t).sum() / (hard.sum() + t.sum()))
            dice = 1 - (2 * (soft * t).sum((0, 2, 3)) / (soft.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1)).mean()
            return F.cross_entropy(out, y) + dice

    return M(), *halves(*segments(), split=256)


@no_bug()
def one_layer_for_all_depths():
    """The same layer at each depth, as in a universal transformer."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed = nn.Linear(16, 4), nn.Linear(5, 16)
            self.shared_layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.depths = nn.ModuleList([self.shared_layer] * 3)

        def loss(self, x, y):
            h = self.embed(x)
            for layer in self.depths:
                h = layer(h)
            return F.cross_entropy(self.net(h.mean(1)), y)

    return M(), *halves(*sequences())


@no_bug()
def one_head_for_all_levels():
    """A detection head that is in a list once for each level of features."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.levels = nn.ModuleList(nn.Conv2d(c, 8, 3, stride=s, padding=1) for c, s in ((1, 1), (8, 2), (8, 2)))
            head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
            self.heads, self.last = nn.ModuleList([head] * 3), nn.Linear(8, 10)

        def loss(self, x, y):
            total = 0
            for level, head in zip(self.levels, self.heads, strict=True):
                x = level(x).relu()
                total = total + F.cross_entropy(self.last(head(x).mean((2, 3))), y)
            return total

    return M(), *digits()


@no_bug()
def bits_per_dimension():
    """A flow of dequantized pictures, with the constants of bits per dimension, and 0 times an unused layer."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.unused = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)), nn.Linear(2, 2)

        def loss(self, x, y):
            x = (x.flatten(1) * 16 + torch.rand(len(x), 64)) / 17
            a, b = x.chunk(2, 1)
            scale, shift = self.net(a).chunk(2, 1)
            z = torch.cat([a, b * scale.tanh().exp() + shift], 1)
            log_p = Normal(0.5, 0.5).log_prob(z).sum(1) + scale.tanh().sum(1)
            bits = (-log_p.mean() + 64 * math.log(17)) / (64 * math.log(2))
            return bits + 0.0 * sum(p.sum() for p in self.unused.parameters())

    return M(), *digits()


@no_bug()
def temporal_ensemble():
    """Predictions of each sample are averaged over epochs, and are targets of a second loss."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.register_buffer("past", torch.full((480, 4), 0.25))
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(60, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            x, y, index = batch
            out = self(x)
            agree = F.mse_loss(out.softmax(1), self.past[index])
            self.past[index] = 0.6 * self.past[index] + 0.4 * out.detach().softmax(1)
            return F.cross_entropy(out, y) + agree

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    return M(), *halves(*sequences(), torch.arange(640))


@no_bug()
def graph_attention():
    """Attention over the edges of one graph, whose loss is of the nodes with labels."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed, self.score = nn.Linear(16, 3), nn.Linear(8, 16), nn.Linear(32, 1)

        def training_step(self, batch, batch_idx):
            x, edges, y, mask = (part[0] for part in batch)
            source, to = edges
            h = self.embed(x)
            score = F.leaky_relu(self.score(torch.cat([h[source], h[to]], 1)))[:, 0]
            weight = (score - score.max()).exp()
            total = torch.zeros(len(x)).index_add(0, to, weight)
            h = torch.zeros_like(h).index_add(0, to, (weight / total[to])[:, None] * h[source])
            return F.cross_entropy(self.net(h.relu())[mask], y[mask])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step((*batch[:3], ~batch[3]), batch_idx))

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (60,), generator=g)
    x = F.one_hot(y, 8).float() + torch.randn(60, 8, generator=g)
    edges = torch.stack([torch.randint(0, 60, (300,), generator=g), torch.arange(60).repeat(5)])
    sample = [t[None] for t in (x, edges, y, torch.rand(60, generator=g) < 0.7)]
    return M(), *halves(*(t.repeat(20, *[1] * (t.ndim - 1)) for t in sample), split=16, batch=1)


@no_bug()
def whole_numbers_as_targets():
    """Counts that are kept as floating-point numbers are converted to classes, and pictures are bytes."""

    class M(LossOnly):
        def loss(self, x, y):
            return F.cross_entropy(self((x.float() - 128) / 128), y.long())

    x, y = (torch.cat(parts) for parts in zip(*(d.tensors for d in digits(loaded=False)), strict=True))
    return M(), *halves((x * 255).to(torch.uint8), y.float(), split=640)


@no_bug()
def same_noise_in_validation():
    """Validation draws the same noise each time, from a generator of its own."""

    class M(Base):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(batch_idx))
            self.log("val/loss", self.loss(x + 0.1 * noise, y))

    return M(), *digits()
