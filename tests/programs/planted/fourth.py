"""Bugs of methods of research, written when all checks were there: docs/diagnosis.md has their first count."""

import copy

import torch
from programs import (
    Base,
    Causal,
    LossOnly,
    Manual,
    Table,
    bug,
    diabetes,
    digits,
    halves,
    mlp,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@bug("constant-term")
def penalty_without_its_graph():
    """A gradient penalty whose own gradient is not computed, as create_graph is forgotten."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.generator = mlp(64, 32, 1), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            real, (opt_g, opt_d) = batch[0].flatten(1), self.optimizers()
            fake = self.generator(torch.randn(len(real), 8))
            mixed = torch.lerp(real, fake.detach(), torch.rand(len(real), 1)).requires_grad_()
            (grad,) = torch.autograd.grad(self.net(mixed).sum(), mixed)
            penalty = (grad.norm(dim=1) - 1).square().mean()
            opt_d.zero_grad()
            self.manual_backward(self.net(fake.detach()).mean() - self.net(real).mean() + 10 * penalty)
            opt_d.step()
            opt_g.zero_grad()
            self.manual_backward(-self.net(fake).mean())
            opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.net)]

    return M(), *digits()


@bug("sample-cut")
def sampled_without_reparameterization():
    """A variational autoencoder that calls sample() where rsample() is meant."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), nn.Linear(8, 64)

        def loss(self, x, y):
            mean, log_var = self.encoder(x).chunk(2, 1)
            z = Normal(mean, (0.5 * log_var).exp()).sample()
            kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
            return F.mse_loss(self.decoder(z), x.flatten(1), reduction="sum") / len(x) + kl

    return M(), *digits()


@bug("random-target")
def noise_drawn_twice():
    """A diffusion model whose target is not the noise that was added."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(65, 64), nn.SiLU(), nn.Linear(64, 64))

        def loss(self, x, y):
            x, t = x.flatten(1) * 2 - 1, torch.rand(len(x), 1)
            noisy = (1 - t).sqrt() * x + t.sqrt() * torch.randn_like(x)
            return F.mse_loss(self.net(torch.cat([noisy, t], 1)), torch.randn_like(x))

    return M(), *digits()


@bug("average-unchanged")
def momentum_of_itself():
    """Contrastive learning with a queue, whose key encoder is averaged with itself."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = mlp(64, 32, 16)
            self.momentum_encoder = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def training_step(self, batch, batch_idx):
            x = batch[0]
            with torch.no_grad():
                for p in self.momentum_encoder.parameters():
                    p.copy_(0.99 * p + 0.01 * p)
                k = F.normalize(self.momentum_encoder(x + 0.1 * torch.randn_like(x)), dim=1)
            q = F.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T.clone()], 1) / 0.2
            at = int(self.place)
            self.queue[at : at + len(k)] = k
            self.place[0] = (at + 32) % 128
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

        def validation_step(self, batch, batch_idx):
            self.log("val/norm", self.net(batch[0]).norm())

    return M(), *digits()


@bug("updated-in-validation")
def observer_sees_validation():
    """Quantization-aware training whose observer updates its range in validation, too."""

    class Quantize(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("high", torch.ones(()))

        def forward(self, x):
            self.high.mul_(0.9).add_(0.1 * x.detach().abs().max())
            scale = self.high / 127
            return x + ((x / scale).round().clamp(-127, 127) * scale - x).detach()

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), Quantize(), nn.Linear(64, 10))

    return M(), *digits()


@bug("stuck-at-zero", "zero-gradient")
def both_factors_are_zero():
    """A low-rank adapter of which both factors begin at 0, so neither gets a gradient."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.zeros(4, 64)), nn.Parameter(torch.zeros(64, 4))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Adapter(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10))

    return M(), *digits()


@bug("double-softmax")
def policy_of_probabilities():
    """A policy gradient that passes probabilities for logits."""

    class M(LossOnly):
        def loss(self, x, y):
            policy = Categorical(logits=self.net(x).softmax(1))
            action = policy.sample()
            reward = (action == y).float()
            return -(policy.log_prob(action) * (reward - reward.mean())).mean()

    return M(), *digits()


@bug("split-layer", "in-no-optimizer")
def weights_of_tasks_in_no_optimizer():
    """Learned weights of two losses, which configure_optimizers forgets."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.side, self.log_vars = nn.Linear(64, 1), nn.Parameter(torch.zeros(2))

        def loss(self, x, y):
            h = self.net[:3](x)
            losses = torch.stack([F.cross_entropy(self.net[3](h), y), F.l1_loss(self.side(h)[:, 0], y / 9)])
            return (losses * (-self.log_vars).exp() + self.log_vars).sum()

        def configure_optimizers(self):
            return torch.optim.Adam([*self.net.parameters(), *self.side.parameters()], 1e-2)

    return M(), *digits()


@bug("nothing-trained", "unregistered", "cut-gradient")
def inner_loop_on_a_copy():
    """Meta-learning whose outer loss is that of a copy, so the network itself gets no gradient."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            fast = copy.deepcopy(self.net)
            inner = torch.optim.SGD(fast.parameters(), 0.1)
            with torch.enable_grad():
                inner.zero_grad()
                F.cross_entropy(fast(x[:16]), y[:16]).backward()
                inner.step()
            return F.cross_entropy(fast(x[16:]), y[16:])

    return M(), *digits()


@bug("future-leak")
def series_read_in_both_directions():
    """Forecasts the next value at each time with a bidirectional network, which has seen it."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 16, batch_first=True, bidirectional=True), nn.Linear(32, 5)

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch[0]))

        def loss(self, x):
            return F.mse_loss(self.net(self.rnn(x)[0])[:, :-1], x[:, 1:])

    return M(), *halves(*sequences())


@bug("batch-order")
def risk_sets_not_sorted():
    """Cox regression over sums of all samples that come later in the batch, which is not sorted by time."""

    class M(Table):
        def loss(self, x, y):
            risk = self(x)[:, 0]
            event = (torch.arange(len(x)) % 3 > 0).float()
            return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    return M(), *diabetes()


@bug("ctc-blank")
def blank_is_a_label():
    """CTC with blank=0, although 0 is a label."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 4)

        def loss(self, x, y):
            log_p = self.net(self.rnn(x)[0]).log_softmax(2).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), y.shape[1])
            return F.ctc_loss(log_p, y, *lengths, zero_infinity=True)

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (320, 4), generator=g)
    x = F.one_hot(y.repeat_interleave(3, 1), 4).float() + torch.randn(320, 12, 4, generator=g) * 0.2
    return M(), *halves(x, y, split=256)


@bug("padding-in-loss")
def padding_is_learned():
    """A language model of padded sequences whose loss does not ignore the padding."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32, padding_idx=0)

        def training_step(self, batch, batch_idx):
            return self.loss(batch[:, :-1], batch[:, 1:])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    rows = tokens().clamp(min=1)
    length = torch.randint(6, 16, (len(rows), 1), generator=torch.Generator().manual_seed(0))
    return M(), *halves(rows.masked_fill(torch.arange(16) >= length, 0))


@bug("cut-gradient")
def gate_by_index():
    """Experts that are chosen by a gate, whose probability is not multiplied."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net, self.gate = nn.Linear(32, 10), nn.Linear(64, 2)
            self.experts = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

        def forward(self, x):
            x = x.flatten(1)
            chosen = self.gate(x).softmax(1).argmax(1)
            h = torch.stack([expert(x) for expert in self.experts], 1)
            return self.net(h[torch.arange(len(x)), chosen].relu())

    return M(), *digits()


@bug("late-parameter", "unregistered", "foreign-optimizer", "cut-gradient", "no-update")
def normalized_when_training_begins():
    """Weight normalization is put on layers after the optimizer was made."""

    class M(Base):
        def on_train_start(self):
            for layer in (self.net[1], self.net[3]):
                nn.utils.parametrizations.weight_norm(layer)

    return M(), *digits()


@bug("hooks-grow")
def hook_in_each_step():
    """A hook that adds noise is registered again in each step."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            self.net[2].register_forward_hook(lambda m, i, out: out + 0.01 * torch.randn_like(out))
            return super().training_step(batch, batch_idx)

    return M(), *digits()


@bug("nothing-trained", "cleared-before-step")
def step_before_backward():
    """Manual optimization that steps, and computes the gradient afterwards."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(*batch)
            optimizer.step()
            self.manual_backward(loss)

    return M(), *digits()


@bug("cut-gradient")
def checkpoint_of_raw_inputs():
    """Reentrant checkpointing of the first block, whose input needs no gradient."""

    class M(Base):
        def forward(self, x):
            return self.net[3](checkpoint(self.net[:3], x, use_reentrant=True))

    return M(), *digits()


@bug("constant-term")
def dice_of_argmax():
    """Segmentation with a dice loss of the predicted classes, which has no gradient."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

        def loss(self, x, y):
            out = self(x)
            p, t = F.one_hot(out.argmax(1), 3).float(), F.one_hot(y, 3).float()
            dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
            return F.cross_entropy(out, y) + dice

    return M(), *halves(*segments(), split=256)


@bug("shared-memory")
def tied_by_data():
    """Two parameters share their memory, so each of them is stepped."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.net.weight.data = self.embed.weight.data

    rows = tokens()
    return M(), *halves(rows[:, :-1], rows[:, 1:])


@bug("global-seed")
def seeded_in_each_step():
    """Dropout draws the same numbers in each step."""

    class M(Base):
        def network(self):
            return nn.Sequential(*mlp()[:3], nn.Dropout(0.2), nn.Linear(64, 10))

        def training_step(self, batch, batch_idx):
            torch.manual_seed(42)
            return super().training_step(batch, batch_idx)

    return M(), *digits()


@bug("truncated-target")
def targets_as_integers():
    """A standardized target is converted to integers."""

    class M(Table):
        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y.long().float())

    return M(), *diabetes()


@bug("bytes-wrap")
def bytes_wrap_around():
    """Pictures of bytes are centered before they are converted."""

    class M(LossOnly):
        def loss(self, x, y):
            return F.cross_entropy(self((x - 128).float() / 128), y)

    x, y = (torch.cat(parts) for parts in zip(*(d.tensors for d in digits(loaded=False)), strict=True))
    return M(), *halves((x * 255).to(torch.uint8), y, split=640)
