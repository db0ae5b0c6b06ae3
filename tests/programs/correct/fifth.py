"""Correct programs that are close to the bugs of ``planted/fifth.py``, and published methods that no other file has."""

import copy
import math

import lightning as L
import torch
from programs import (
    Base,
    Causal,
    Convnet,
    LossOnly,
    Manual,
    Table,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    no_bug,
    segments,
    sequences,
    tokens,
)
from programs.planted.fifth import Augmented, Copied, transitions
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

# Statements, names, signs


@no_bug()
def statements_that_act():
    """In-place operations, warm-up calls of lazy layers, names that are helpers, and values that are only kept."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(10))
            self.net(torch.zeros(2, 1, 8, 8))
            self.last = None

        def train_step(self, x, y):
            hidden = self.net[:3](x)
            mask = hidden > 0
            mask.logical_not_()
            self.last = mask.float().mean().item()
            return F.cross_entropy(self.net[3](hidden), y)

        def loss(self, x, y):
            count, *_ = x.shape
            assert count
            return self.train_step(x, y)

        def val_step(self, x, y):
            return self.loss(x, y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.val_step(*batch))

    return M(), *digits()


@no_bug()
def unused_values():
    """Unpacked values and counters that nothing reads."""

    class M(LossOnly):
        def loss(self, x, y):
            n, *_ = x.shape
            size = x.size(0)  # noqa: F841
            assert n
            out = self(x)
            probabilities = out.softmax(1)  # noqa: F841
            return F.cross_entropy(out, y)

    return M(), *digits()


@no_bug()
def reward_maximized():
    """A reward is maximized by maximize=True, and its bonus by a minus."""

    class M(LossOnly):
        def loss(self, x, y):
            choice = Categorical(logits=self(x))
            reward = (choice.probs.gather(1, y[:, None]) * 2 - 1).mean()
            return reward + 0.01 * choice.entropy().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2, maximize=True)

    return M(), *digits()


@no_bug()
def confusion_maximized():
    """Adversarial training of features: the loss of a frozen critic is maximized, beside that of the task."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.critic = nn.Linear(10, 2).requires_grad_(False)

        def loss(self, x, y):
            out = self(x)
            return F.cross_entropy(out, y) - 0.1 * F.cross_entropy(self.critic(out), y % 2)

    return M(), *digits()


@no_bug()
def entropy_minimized():
    """Test-time adaptation: the entropy of predictions is all that is minimized, as -(p log p)."""

    class M(LossOnly):
        def network(self):
            return Convnet()

        def loss(self, x, y):
            log_p = self(x).log_softmax(1)
            return -(log_p.exp() * log_p).sum(1).mean()

    return M(), *digits()


@no_bug()
def minimax_gan():
    """The generator maximizes the loss of the discriminator, as in the first paper."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.generator = mlp(64, 32, 1), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            opt_g, opt_d = self.optimizers()
            real, fake = batch[0].flatten(1), self.generator(torch.randn(len(batch[0]), 8))
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            bce = F.binary_cross_entropy_with_logits
            opt_d.zero_grad()
            self.manual_backward(bce(self.net(real), ones) + bce(self.net(fake.detach()), zeros))
            opt_d.step()
            opt_g.zero_grad()
            self.manual_backward(-bce(self.net(fake), zeros))
            opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.net)]

    return M(), *digits()


@no_bug()
def vae_with_log_deviation():
    """The network returns the logarithm of the deviation, so exp() is right, and the divergence has 2 of it."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), mlp(8, 32, 64)

        def loss(self, x, y):
            mean, log_std = self.encoder(x).chunk(2, 1)
            z = mean + log_std.exp() * torch.randn_like(mean)
            kl = -0.5 * (1 + 2 * log_std - mean.pow(2) - (2 * log_std).exp()).sum(1).mean()
            return F.mse_loss(self.decoder(z), x.flatten(1)) + 1e-3 * kl

    return M(), *digits()


@no_bug()
def vae_of_distributions():
    """kl_divergence of torch, free bits, and a Gaussian likelihood."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), mlp(8, 32, 64)

        def loss(self, x, y):
            mean, raw = self.encoder(x).chunk(2, 1)
            posterior = Normal(mean, F.softplus(raw) + 1e-3)
            kl = kl_divergence(posterior, Normal(0.0, 1.0)).mean(0).clamp(min=0.1).sum()
            return -Normal(self.decoder(posterior.rsample()), 0.3).log_prob(x.flatten(1)).sum(1).mean() + kl

    return M(), *digits()


@no_bug()
def spread_is_rewarded():
    """VICReg: the deviation of each output is pushed up to 1, the covariance down; both views have a gradient."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            a, b = self.net(x + 0.1 * torch.randn_like(x)), self.net(x + 0.1 * torch.randn_like(x))
            spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
            cov = sum((z - z.mean(0)).T.cov(correction=1).fill_diagonal_(0).pow(2).sum() / 16 for z in (a, b))
            return 25 * F.mse_loss(a, b) + 25 * spread + 1e-2 * cov

    return M(), *digits()


@no_bug()
def distances_maximized():
    """Triplets by hand: the distance to the negative enters with a minus, within a margin."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            z = self.net(x)
            return (1 + (z - z.roll(1, 0)).pow(2).sum(1) - (z - z.roll(3, 0)).pow(2).sum(1)).relu().mean()

    return M(), *digits()


# Masks and sequences


def padded(kind="tuple"):
    g = torch.Generator().manual_seed(0)
    x, lengths = torch.randint(1, 20, (640, 10), generator=g), torch.randint(3, 11, (640,), generator=g)
    mask = (torch.arange(10) < lengths[:, None]).long()
    y = x[:, 0] % 4
    if kind == "tuple":
        return halves(x * mask, lengths, y)
    rows = [{"input_ids": a, "attention_mask": b, "labels": c} for a, b, c in zip(x * mask, mask, y, strict=True)]
    return loaders(rows[:480], rows[480:])


@no_bug()
def mask_passed():
    """A dict of tokens and mask, inverted for torch, and an output like that of transformers."""

    class Output(dict):
        __getattr__ = dict.__getitem__

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places, self.head = nn.Embedding(20, 16), nn.Embedding(10, 16), nn.Linear(16, 4)
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

        def forward(self, input_ids, attention_mask=None, labels=None):
            mask = attention_mask == 0
            hidden = self.embed(input_ids) + self.places.weight[: input_ids.shape[1]]
            hidden = self.encoder(hidden, src_key_padding_mask=mask)
            kept = attention_mask[..., None].float()
            logits = self.head((hidden * kept).sum(1) / kept.sum(1))
            return Output(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)

    class M(LossOnly):
        def network(self):
            return Model()

        def training_step(self, batch, batch_idx):
            return self.net(**batch).loss

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.net(**batch).loss)

    return M(), *padded("dict")


@no_bug()
def causal_model_needs_no_mask():
    """Tokens are padded on the right; a causal model ignores the mask, and labels of padding are -100."""

    class M(Causal):
        def loss(self, batch):
            x = batch["input_ids"]
            labels = torch.where(batch["attention_mask"].bool(), x, -100)
            return F.cross_entropy(self(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))

    t = tokens(10)
    lengths = torch.randint(3, 11, (640,), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < lengths[:, None]).long()
    rows = [{"input_ids": a, "attention_mask": b} for a, b in zip(t * mask, mask, strict=True)]
    return M(), *loaders(rows[:480], rows[480:])


@no_bug()
def masked_modeling_mask():
    """The mask of the batch says what is to be predicted, not what is padding."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed, self.places = nn.Linear(32, 12), nn.Embedding(13, 32), nn.Embedding(16, 32)
            self.body = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

        def loss(self, x, mask):
            hidden = self.body(self.embed(torch.where(mask, 12, x)) + self.places.weight)
            return F.cross_entropy(self.net(hidden)[mask], x[mask])

    t = tokens()
    return M(), *halves(t, torch.rand(t.shape, generator=torch.Generator().manual_seed(0)) < 0.25)


@no_bug()
def lengths_packed():
    """Series with their lengths, packed; zeros follow them."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 4), nn.GRU(5, 16, batch_first=True)

        def loss(self, x, lengths, y):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return F.cross_entropy(self.net(self.body(packed)[1][-1]), y)

    x, y = sequences()
    lengths = torch.randint(5, 13, (len(x),), generator=torch.Generator().manual_seed(0))
    return M(), *halves(x * (torch.arange(12) < lengths[:, None])[..., None], lengths, y)


@no_bug()
def last_valid_state():
    """The output at the last valid time is gathered."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 4), nn.GRU(5, 16, batch_first=True)

        def loss(self, x, lengths, y):
            out, _ = self.body(x)
            return F.cross_entropy(self.net(out[torch.arange(len(x)), lengths - 1]), y)

    x, y = sequences()
    lengths = torch.randint(5, 13, (len(x),), generator=torch.Generator().manual_seed(0))
    return M(), *halves(x * (torch.arange(12) < lengths[:, None])[..., None], lengths, y)


@no_bug()
def imputation():
    """A mask of observed values is an input; what is missing is to be predicted."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))

        def loss(self, x, observed, y):
            out = self.net(torch.cat([x * observed, observed], 1))
            return ((out - x) * (1 - observed)).square().sum() / (1 - observed).sum()

    x, y = next(iter(DataLoader(diabetes(loaded=False)[0], 320)))
    return M(), *halves(x, (torch.rand(x.shape) < 0.7).float(), y, split=240)


@no_bug()
def attention_over_sets():
    """Set Transformer: points have no order."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed = nn.Linear(16, 2), nn.Linear(3, 16)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)

        def forward(self, x):
            return self.net(self.encoder(self.embed(x)).mean(1))

    x = torch.randn(640, 8, 3, generator=torch.Generator().manual_seed(0))
    return M(), *halves(x, (x.norm(dim=2).mean(1) > 1.6).long())


@no_bug()
def bag_of_words():
    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.EmbeddingBag(12, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.net(self.embed(x))

    x = tokens()
    return M(), *halves(x, (x.float().mean(1) > 5.5).long())


@no_bug()
def one_step_cells():
    """A GRUCell over time, and another one that starts from zeros, as its sequence is one long."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.cell = nn.Linear(16, 4), nn.LSTMCell(5, 16)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.net(state[0])

    return M(), *halves(*sequences())


@no_bug()
def state_from_context():
    """Image captioning: the first state is computed from the other input; teacher forcing."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.start, self.embed = nn.Linear(32, 12), mlp(64, 32, 32), nn.Embedding(13, 32)
            self.body = nn.GRU(32, 32, batch_first=True)

        def loss(self, x, t):
            first = torch.full((len(t), 1), 12)
            out, _ = self.body(self.embed(torch.cat([first, t[:, :-1]], 1)), self.start(x)[None])
            return F.cross_entropy(self.net(out).transpose(1, 2), t)

    x, _ = next(iter(DataLoader(digits(loaded=False)[0], 640)))
    return M(), *halves(x, tokens())


@no_bug()
def another_truncated_backpropagation():
    """Chunks of a long sequence within a step, states detached between them, zeros at each new batch."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 5), nn.LSTM(5, 16, batch_first=True)

        def training_step(self, batch, batch_idx):
            optimizer, state = self.optimizers(), None
            for chunk in batch[0].split(4, 1):
                out, state = self.body(chunk[:, :-1], state)
                optimizer.zero_grad()
                self.manual_backward(F.mse_loss(self.net(out), chunk[:, 1:]))
                optimizer.step()
                state = tuple(s.detach() for s in state)

    return M(), *halves(*sequences())


@no_bug()
def as_many_classes_as_steps():
    """Logits (N, T, C) with T = C are transposed."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 12), nn.GRU(5, 16, batch_first=True)

        def forward(self, x):
            return self.net(self.body(x)[0]).transpose(1, 2)

    x, _ = sequences()
    return M(), *halves(x, (x[..., 0] * 2).long().clamp(0, 3))


@no_bug()
def instances_in_bags():
    """Attention-based multiple-instance learning: the softmax is over the instances of a bag."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), nn.Linear(16, 4)
            self.score = nn.Linear(16, 1)

        def forward(self, x):
            h = self.embed(x)
            return self.net((self.score(h).softmax(1) * h).sum(1))

    return M(), *halves(*sequences())


@no_bug()
def slots_compete():
    """Slot attention: a softmax over slots, normalized over inputs; slots start from a learned mean."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed, self.cell = nn.Linear(16, 4), nn.Linear(5, 16), nn.GRUCell(16, 16)
            self.start, self.q, self.k = nn.Parameter(torch.randn(3, 16)), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            h, slots = self.embed(x), self.start.expand(len(x), -1, -1)
            for _ in range(2):
                a = (self.k(h) @ self.q(slots).transpose(1, 2) / 4).softmax(-1) + 1e-6
                update = (a / a.sum(1, keepdim=True)).transpose(1, 2) @ h
                slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            return self.net(slots.mean(1))

    return M(), *halves(*sequences())


# Contrastive learning, copies of networks


@no_bug()
def simclr_with_mask():
    """NT-Xent by masked_fill and cross_entropy."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
            z = F.normalize(self.net(views), dim=1)
            logits = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
            return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))

    return M(), *digits()


@no_bug()
def moco_positive_first():
    """The positive is column 0 before a queue, so all targets are 0."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = mlp(64, 64, 16)
            self.key = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(31, 16), dim=1))

        def loss(self, x, y):
            q = F.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=1)
            with torch.no_grad():
                for p, s in zip(self.key.parameters(), self.net.parameters(), strict=True):
                    p.mul_(0.99).add_(s, alpha=0.01)
                k = F.normalize(self.key(x), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], 1) / 0.1
            if self.training:
                self.queue = torch.cat([k, self.queue])[:31]
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return M(), *digits()


@no_bug()
def scores_without_norm():
    """Two towers whose scores are plain dot products, small at first (recommendation with in-batch negatives)."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.users, self.items, self.net = nn.Embedding(100, 16), nn.Embedding(100, 16), None
            for part in (self.users, self.items):
                nn.init.normal_(part.weight, std=0.05)

        def loss(self, u, i):
            return F.cross_entropy(self.users(u) @ self.items(i).T, torch.arange(len(u)))

    u = torch.randint(0, 100, (640,), generator=torch.Generator().manual_seed(0))
    return M(), *halves(u, (u * 7 + 3) % 100)


@no_bug()
def simsiam_with_detach():
    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.predictor = mlp(64, 64, 16), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))

        def loss(self, x, y):
            one, two = self.net(x + 0.1 * torch.randn_like(x)), self.net(x + 0.1 * torch.randn_like(x))
            p, q = self.predictor(one), self.predictor(two)
            return -(F.cosine_similarity(p, two.detach()).mean() + F.cosine_similarity(q, one.detach()).mean()) / 2

    return M(), *digits()


@no_bug()
def pairs_with_labels():
    """A Siamese network whose cosine similarity is regressed on a label of each pair."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            same = (y == y.roll(1)).float()
            z = self.net(x)
            return F.mse_loss(F.cosine_similarity(z, z.roll(1, 0)), same)

    return M(), *digits()


@no_bug()
def latent_consistency():
    """Both sides of a consistency loss have a gradient, beside a reconstruction (as of a Koopman operator)."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.decoder, self.step = mlp(10, 32, 8), mlp(8, 32, 10), nn.Linear(8, 8)

        def loss(self, x, y):
            z, after = self.net(x), self.net(x * 0.9)
            return F.mse_loss(self.decoder(z), x) + F.mse_loss(self.step(z), after)

    return M(), *diabetes()


@no_bug()
def another_q_learning():
    return Copied(), *transitions()


@no_bug()
def double_q_learning_with_late_copy():
    """Actions by the network, values by its copy, which is renewed each 1,000 steps, that is never here."""

    class M(Copied):
        count = 0

        def loss(self, batch):
            q = self.net(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
            with torch.no_grad():
                best = self.net(batch["next_state"]).argmax(1, keepdim=True)
                after = self.target_net(batch["next_state"]).gather(1, best)[:, 0]
            return F.smooth_l1_loss(q, batch["reward"] + 0.9 * (1 - batch["done"]) * after)

        def on_train_batch_end(self, *args):
            self.count += 1
            if self.count % 1000 == 0:
                self.target_net.load_state_dict(self.net.state_dict())

    return M(), *transitions()


@no_bug()
def value_of_next_state_with_gradient():
    """Residual gradients (Baird): both sides have one, on purpose; the state value is no maximum."""

    class M(Copied):
        def loss(self, batch):
            v = self.net(batch["state"]).mean(1)
            goal = batch["reward"] + 0.9 * (1 - batch["done"]) * self.net(batch["next_state"]).mean(1)
            return F.mse_loss(v, goal)

    return M(), *transitions()


@no_bug()
def random_target():
    """Random network distillation, and a shared body that two names have on purpose."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.target = mlp(64, 32, 16), mlp(64, 32, 16).requires_grad_(False)
            self.encoder = self.net

        def loss(self, x, y):
            with torch.no_grad():
                goal = self.target(x)
            return F.mse_loss(self.encoder(x), goal)

    return M(), *digits()


@no_bug()
def average_with_warm_up():
    """The decay of the average rises from 0.1, as in timm and diffusers."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.ema, self.count = copy.deepcopy(self.net).requires_grad_(False), 0

        def on_train_batch_end(self, *args):
            self.count += 1
            decay = min(0.999, (1 + self.count) / (10 + self.count))
            for a, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                a.lerp_(p.data, 1 - decay)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self.ema(batch[0]), batch[1]))

    return M(), *digits()


@no_bug()
def mean_teacher_with_dropout():
    """The teacher is an average, and has dropout, too, as in the paper."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))

        def __init__(self):
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def loss(self, x, y):
            with torch.no_grad():
                soft = self.teacher(x).softmax(1)
            out = self(x)
            return F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), soft)

        def on_train_batch_end(self, *args):
            for a, p in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                a.lerp_(p.data, 0.05)

    return M(), *digits()


@no_bug()
def teacher_evaluates():
    """A frozen teacher that train() leaves in evaluation mode."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = Convnet().requires_grad_(False)
            self.train()

        def train(self, mode=True):
            super().train(mode)
            self.teacher.eval()
            return self

        def loss(self, x, y):
            with torch.no_grad():
                soft = (self.teacher(x) / 4).softmax(1)
            out = self(x)
            return F.cross_entropy(out, y) + 16 * F.kl_div((out / 4).log_softmax(1), soft, reduction="batchmean")

    return M(), *digits()


@no_bug()
def shared_backward():
    """One backward pass for two optimizers, and one optimizer that adds up several."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(32, 10), nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())

        def training_step(self, batch, batch_idx):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                self.manual_backward(F.cross_entropy(self.net(self.body(x)), y) / 2)
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.Adam(self.body.parameters(), 1e-3)]

    return M(), *digits()


@no_bug()
def gan_that_clears_both():
    """Samples are not detached, but both optimizers clear before each backward pass, hinge losses."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.generator = mlp(64, 32, 1), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            opt_g, opt_d = self.optimizers()
            real = batch[0].flatten(1)
            fake = self.generator(torch.randn(len(real), 8))
            opt_d.zero_grad()
            self.manual_backward((1 - self.net(real)).relu().mean() + (1 + self.net(fake)).relu().mean())
            opt_d.step()
            opt_g.zero_grad()
            self.manual_backward(-self.net(self.generator(torch.randn(len(real), 8))).mean())
            opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.net)]

    return M(), *digits()


# Modes, layers, optimizers


@no_bug()
def frozen_body_evaluates():
    """A frozen body in evaluation mode; another one adapts its statistics on purpose (AdaBN), as its docs say."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(16, 10)
            self.backbone = nn.Sequential(*list(Convnet())[:-2]).requires_grad_(False)

        def on_train_epoch_start(self):
            self.backbone.eval()

        def forward(self, x):
            return self.net(self.backbone(x))

    return M(), *digits()


@no_bug()
def momentum_encoder_with_batch_norm():
    """BYOL: the target's BatchNorm is in training mode, as in the paper's code."""

    class M(LossOnly):
        def network(self):
            return Convnet(16)

        def __init__(self):
            super().__init__()
            self.target = copy.deepcopy(self.net).requires_grad_(False)
            self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

        def loss(self, x, y):
            p = self.predictor(self.net(x + 0.1 * torch.randn_like(x)))
            with torch.no_grad():
                z = self.target(x + 0.1 * torch.randn_like(x))
            return 2 - 2 * F.cosine_similarity(p, z).mean()

        def on_train_batch_end(self, *args):
            for a, b in zip(self.target.parameters(), self.net.parameters(), strict=True):
                a.lerp_(b.data, 0.01)

    return M(), *digits()


@no_bug()
def principal_components():
    """A linear autoencoder, and a low-rank layer without an activation between."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 64))

        def loss(self, x, y):
            return F.mse_loss(self.net(x), x.flatten(1))

    return M(), *digits()


@no_bug()
def matrix_factorization():
    """Users, items and biases, without any activation."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.users, self.items, self.bias = (
                None,
                nn.Embedding(50, 8),
                nn.Embedding(40, 8),
                nn.Embedding(50, 1),
            )

        def loss(self, u, i, r):
            return F.mse_loss((self.users(u) * self.items(i)).sum(1) + self.bias(u)[:, 0], r)

    g = torch.Generator().manual_seed(0)
    u, i = torch.randint(0, 50, (640,), generator=g), torch.randint(0, 40, (640,), generator=g)
    return M(), *halves(u, i, ((u % 5) * (i % 3)).float() / 4)


@no_bug()
def logistic_regression():
    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    return M(), *digits()


@no_bug(max_epochs=10)
def schedules_that_rise():
    """Warm restarts, a triangle of CyclicLR, and OneCycle."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True
            self.second, self.third = nn.Linear(10, 10), nn.Linear(10, 10)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.third(self.second(self(batch[0])).relu()), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=10)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return M(), *digits(count=160)


@no_bug()
def schedule_by_hand():
    """The module calls its schedule in on_train_epoch_end, with automatic optimization."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), self.lr)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return optimizer

        def on_train_epoch_end(self):
            self.schedule.step()

    return M(), *digits()


@no_bug()
def losses_kept_for_the_epoch():
    """Lightning's idiom: outputs of the steps are kept in a list, and cleared at the end of the epoch."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            self.outputs.append(loss)
            return loss

        def on_train_epoch_end(self):
            self.log("train/mean", torch.stack(self.outputs).mean())
            self.outputs.clear()

    return M(), *digits()


@no_bug()
def long_unrolls():
    """The number of inner steps grows during training, and with it the graph."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.cell, self.count = nn.Linear(16, 10), nn.GRUCell(64, 16), 0

        def loss(self, x, y):
            h = torch.zeros(len(x), 16)
            for _ in range(1 + min(self.count, 20)):
                h = self.cell(x.flatten(1), h)
            return F.cross_entropy(self.net(h), y)

        def on_train_batch_end(self, *args):
            self.count += 1

    return M(), *digits()


@no_bug()
def smoothing_and_dropout():
    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 10))

        def loss(self, x, y):
            return F.cross_entropy(self(x), y, label_smoothing=0.1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.95, nesterov=True, weight_decay=1e-3)

    return M(), *digits()


@no_bug()
def reverse_divergence():
    """The student's distribution is the target of kl_div (mode-seeking distillation)."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = mlp().requires_grad_(False)

        def loss(self, x, y):
            log_p = self(x).log_softmax(1)
            with torch.no_grad():
                log_q = self.teacher(x).log_softmax(1)
            return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")

    return M(), *digits()


@no_bug()
def deep_sigmoids_with_adam():
    """Small gradients, which Adam scales."""

    class M(Base):
        def network(self):
            body = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Sigmoid())]
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), *body, nn.Linear(32, 10))

    return M(), *digits()


@no_bug()
def rates_of_layers():
    """A body at 1/1000 of the rate of the head."""

    class M(Base):
        def configure_optimizers(self):
            body, head = self.net[1].parameters(), self.net[3].parameters()
            return torch.optim.AdamW([{"params": body, "lr": 1e-6}, {"params": head, "lr": 1e-3}])

    return M(), *digits()


@no_bug()
def another_mixture_density():
    """Mixture density network: logsumexp of weighted normal densities."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 12))

        def loss(self, x, y):
            weight, mean, log_std = self.net(x).chunk(3, 1)
            density = Normal(mean, log_std.clamp(-5, 5).exp()).log_prob(y[:, None])
            return -(weight.log_softmax(1) + density).logsumexp(1).mean()

    return M(), *diabetes()


@no_bug()
def gumbel_softmax():
    """Straight-through Gumbel-softmax between encoder and decoder."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.decoder = mlp(64, 64, 40), mlp(40, 64, 64)

        def loss(self, x, y):
            logits = self.net(x).view(-1, 5, 8)
            code = F.gumbel_softmax(logits, tau=1.0, hard=self.training, dim=-1)
            q = logits.softmax(-1)
            kl = (q * (q + 1e-9).log()).sum(-1).mean() + math.log(8)
            return F.mse_loss(self.decoder(code.flatten(1)), x.flatten(1)) + 0.01 * kl

    return M(), *digits()


@no_bug()
def another_policy_gradient():
    """REINFORCE with costs, which are minimized, and a baseline."""

    class M(Copied):
        def loss(self, batch):
            choice = Categorical(logits=self.net(batch["state"]))
            cost = -batch["reward"] * (1 - batch["done"]) + 0 * batch["next_state"].sum()
            return (choice.log_prob(batch["action"]) * (cost - cost.mean())).mean() - 0.01 * choice.entropy().mean()

    return M(), *transitions()


@no_bug()
def proximal_policy():
    """The clipped objective of PPO, with a minus, a value loss and an entropy bonus."""

    class M(Copied):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(4, 1)

        def loss(self, batch):
            choice, value = Categorical(logits=self.net(batch["state"])), self.value(batch["state"])[:, 0]
            with torch.no_grad():
                old = Categorical(logits=self.target_net(batch["state"])).log_prob(batch["action"])
                goal = batch["reward"] + 0.9 * (1 - batch["done"]) * self.value(batch["next_state"])[:, 0]
                gain = goal - value
            ratio = (choice.log_prob(batch["action"]) - old).exp()
            policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            return policy + 0.5 * F.mse_loss(value, goal) - 0.01 * choice.entropy().mean()

    return M(), *transitions()


# Data and metrics


@no_bug()
def features_that_tell_the_class():
    """A column from which the class follows, but that is not the class."""
    x = torch.randn(640, 6, generator=torch.Generator().manual_seed(0))

    class M(Base):
        def network(self):
            return mlp(6, 16, 2)

    return M(), *halves(x, (x[:, 0] > 0).long())


@no_bug()
def windows_split_by_time():
    """Overlapping windows; validation is later, and shares values with training at the boundary only."""
    g = torch.Generator().manual_seed(0)
    windows = (torch.randn(900, generator=g).cumsum(0) * 0.1).unfold(0, 13, 1)

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    return M(), *halves(windows[:, :12].clone(), windows[:, 12].clone(), split=700)


@no_bug()
def dark_pictures():
    """Night images: values of up to 1, most below 0.01."""
    x = torch.rand(640, 3, 8, 8, generator=torch.Generator().manual_seed(0)).pow(8)

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))

    return M(), *halves(x, (x[:, 0].mean((1, 2)) > 0.11).long())


@no_bug()
def random_pairs_in_validation():
    """A Siamese dataset draws pairs and their label, in validation, too."""

    class Pairs(Dataset):
        def __init__(self, part):
            self.part = part

        def __len__(self):
            return len(self.part)

        def __getitem__(self, i):
            j = int(torch.randint(len(self.part), ()))
            return self.part[i][0], self.part[j][0], (self.part[i][1] == self.part[j][1]).float()

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, a, b, same):
            distance = (self.net(a) - self.net(b)).pow(2).sum(1)
            return (same * distance + (1 - same) * (1 - (distance + 1e-6).sqrt()).relu().square()).mean()

    train, val = digits(loaded=False)
    return M(), *loaders(Pairs(train), Pairs(val))


@no_bug()
def validation_is_clean():
    """Only training is augmented."""
    train, val = digits(loaded=False)
    return Base(), *loaders(Augmented(train), val)


@no_bug()
def denoising_in_validation():
    """Noise is drawn by the dataset for both splits; the target is the clean picture."""

    class Noisy(Augmented):
        def __getitem__(self, i):
            x = self.part[i][0]
            return x + 0.3 * torch.randn_like(x), x.flatten()

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 64)

        def loss(self, x, clean):
            return F.mse_loss(self.net(x), clean)

    train, val = digits(loaded=False)
    return M(), *loaders(Noisy(train), Noisy(val))


@no_bug()
def metrics_of_each_split():
    """A metric for each split; that of training is also called for its value in a step."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.train_accuracy, self.val_accuracy = MulticlassAccuracy(10), MulticlassAccuracy(10)

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.train_accuracy(out, batch[1])
            self.log("train/acc", self.train_accuracy, on_step=False, on_epoch=True)
            return F.cross_entropy(out, batch[1])

        def validation_step(self, batch, batch_idx):
            self.val_accuracy(self(batch[0]), batch[1])
            self.log("val/acc", self.val_accuracy)

    return M(), *digits()


@no_bug()
def threshold_of_probabilities():
    """Logits for the loss, probabilities and 0 for decisions."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 1)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y > 4).float())

        def validation_step(self, batch, batch_idx):
            y = (batch[1] > 4).float()
            logits = self(batch[0]).squeeze(1)
            self.log("val/loss", F.binary_cross_entropy_with_logits(logits, y))
            self.log("val/acc", ((logits.sigmoid() > 0.5).float() == y).float().mean())
            self.log("val/confident", (logits > 0).float().mean())

    return M(), *digits()


@no_bug()
def collate_pads_and_sorts():
    """collate_fn sorts samples and labels alike."""
    train, val = digits(loaded=False)

    def collate(rows):
        x, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        order = x.flatten(1).sum(1).argsort(descending=True)
        return x[order], y[order]

    return Base(), *loaders(train, val, collate_fn=collate)


@no_bug()
def identifiers_in_the_batch():
    """A dict with an index, a path and a group, which only reports need; weights are read."""
    x, y = next(iter(DataLoader(digits(loaded=False)[0], 640)))
    rows = [
        {"image": a, "label": b, "index": i, "weight": 1.0 + i % 2} for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]

    class M(Base):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch["image"]), batch["label"], reduction="none")
            return (loss * batch["weight"].float()).sum() / batch["weight"].sum()

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self(batch["image"]), batch["label"]))

    return M(), *loaders(rows[:480], rows[480:])


@no_bug()
def pixels_in_two_scales():
    """Deep supervision: the loss of a coarse head, whose labels are taken from every second pixel, is added."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 2, stride=2)
            self.coarse, self.fine = nn.Conv2d(8, 3, 1), nn.Conv2d(16, 3, 1)

        def loss(self, x, y):
            a = self.first(x).relu()
            b = self.down(a).relu()
            up = F.interpolate(b, scale_factor=2)
            fine, coarse = self.fine(torch.cat([a, up], 1)), self.coarse(b)
            return F.cross_entropy(fine, y) + 0.4 * F.cross_entropy(coarse, y[:, ::2, ::2])

    return M(), *halves(*segments(), split=240)


@no_bug()
def self_training():
    """FixMatch: confident predictions of weak views are labels of strong ones."""

    class M(LossOnly):
        def loss(self, x, y):
            labelled = F.cross_entropy(self(x[:8]), y[:8])
            with torch.no_grad():
                sure, label = self(x).softmax(1).max(1)
            strong = F.cross_entropy(self(x + 0.3 * torch.randn_like(x)), label, reduction="none")
            return labelled + (strong * (sure > 0.8)).mean()

    return M(), *digits()


@no_bug()
def curriculum():
    """Easy samples first: the share of the batch that is used grows with the epoch."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
            count = max(4, int(len(loss) * min(1.0, (self.current_epoch + 1) / 3)))
            return loss.topk(count, largest=False).values.mean()

    return M(), *digits()


@no_bug()
def written_with_a_plus():
    """Terms that are written with their sign, and parts with methods that tensors have, too, but that act in place."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 16)

        @torch.no_grad()
        def normalize(self):
            self.table.weight.copy_(F.normalize(self.table.weight, dim=1))

        @torch.no_grad()
        def clip(self):
            self.table.weight.clamp_(-1, 1)

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.codebook, self.net = Codebook(), nn.Sequential(nn.Flatten(), nn.Linear(64, 16))

        def loss(self, x, y):
            self.codebook.normalize()
            self.codebook.clip()
            sign = +1.0
            z = self.net(x)
            own = z.square().mean()
            total = +F.cross_entropy(z @ self.codebook.table.weight.T * 4 * sign, y) - 0.001 * own
            return total + 0.002 * own

    return M(), *digits()


@no_bug()
def costs_of_steps():
    """REINFORCE whose returns are all negative, as where each step costs something, by both ways to write it."""

    class M(LossOnly):
        def loss(self, x, y):
            logits = self(x)
            action = Categorical(logits=logits.detach()).sample()
            returns = -1.0 - (action != y).float() * torch.rand(len(y))
            log_p = logits.log_softmax(1).gather(1, action[:, None])[:, 0]
            if self.by_cross_entropy:
                return (F.cross_entropy(logits, action, reduction="none") * returns).mean()
            return -(log_p * returns).mean()

    one = M()
    one.by_cross_entropy = False
    return one, *digits()


@no_bug()
def costs_by_cross_entropy():
    """The same by F.cross_entropy, whose values are multiplied by negative returns."""
    module, *data = costs_of_steps()
    module.by_cross_entropy = True
    return module, *data


@no_bug()
def labels_of_two_kinds():
    """collate_fn makes two classes of ten."""

    def collate(rows):
        return torch.stack([r[0] for r in rows]), torch.stack([(r[1] > 4).long() for r in rows])

    train, val = digits(loaded=False)
    return Base(), DataLoader(train, 64, shuffle=True, collate_fn=collate), DataLoader(val, 64, collate_fn=collate)


class CallsSchedule(L.Callback):
    """Calls the schedule of the module."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.schedule.step()


@no_bug(callbacks=lambda: [CallsSchedule()])
def schedule_of_a_callback():
    """A callback calls the schedule, which configure_optimizers therefore does not return."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
            return optimizer

    return M(), *digits()
