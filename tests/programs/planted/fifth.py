"""Bugs by the catalogues of the literature and of public issues: docs/diagnosis.md has their first count."""

import copy

import torch
from programs import (
    Base,
    Causal,
    Convnet,
    LossOnly,
    Manual,
    Table,
    bug,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

# Statements and names


@bug("no-effect")
def mask_not_assigned():
    """masked_fill returns a new tensor, which is dropped."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x, mask):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 4
            scores.masked_fill(~mask[:, None], float("-inf"))
            return scores.softmax(-1) @ v

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed, self.attention = nn.Linear(16, 4), nn.Embedding(20, 16), Attention()

        def loss(self, x, mask, y):
            hidden = self.attention(self.embed(x) + torch.arange(10)[:, None] / 10, mask)
            return F.cross_entropy(self.net(hidden[:, 0]), y)

    g = torch.Generator().manual_seed(0)
    x, lengths = torch.randint(1, 20, (640, 10), generator=g), torch.randint(3, 11, (640,), generator=g)
    mask = torch.arange(10) < lengths[:, None]
    return M(), *halves(torch.where(mask, x, 0), mask, x[:, 0] % 4)


@bug("no-effect")
def auxiliary_loss_not_added():
    """``loss + 0.1 * penalty`` stands alone on its line."""

    class M(LossOnly):
        def loss(self, x, y):
            hidden = self.net[:3](x)
            loss = F.cross_entropy(self.net[3](hidden), y)
            loss + 0.1 * hidden.abs().mean()
            return loss

    return M(), *digits()


@bug("no-effect")
def plus_and_equal_exchanged():
    """``loss =+ …`` assigns the last term only."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body, self.second = nn.Linear(64, 10), nn.Flatten(), nn.Linear(64, 2)

        def loss(self, x, y):
            hidden = self.body(x)
            loss = F.cross_entropy(self.net(hidden), y)
            loss = +F.cross_entropy(self.second(hidden), y % 2)
            return loss  # noqa: RET504

    return M(), *digits()


@bug("no-effect")
def normalization_dropped():
    """F.normalize is called, and its result is not used."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.scale = mlp(64, 64, 16), nn.Parameter(torch.tensor(2.0))

        def loss(self, x, y):
            a, b = self.net(x + 0.1 * torch.randn_like(x)), self.net(x)
            F.normalize(a, dim=1)
            F.normalize(b, dim=1)
            return F.cross_entropy(self.scale.exp() * a @ b.T, torch.arange(len(a)))

    return M(), *digits()


@bug("unused-value")
def mask_never_passed():
    """The mask of padding is computed, and not passed to the encoder."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed = nn.Linear(16, 4), nn.Embedding(20, 16)
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, tokens):
            padding_mask = tokens == 0  # noqa: F841
            hidden = self.encoder(self.embed(tokens) + torch.arange(tokens.shape[1])[:, None] / 10)
            return self.net(hidden[:, 0])

    return M(), *_padded()


def _padded():
    g = torch.Generator().manual_seed(0)
    x, lengths = torch.randint(1, 20, (640, 10), generator=g), torch.randint(3, 11, (640,), generator=g)
    return halves(torch.where(torch.arange(10) < lengths[:, None], x, 0), x[:, 0] % 4)


@bug("unused-value")
def noise_not_used():
    """A denoising autoencoder whose noisy input is computed, and the clean one encoded."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 32, 64)

        def loss(self, x, y):
            noisy = x + 0.3 * torch.randn_like(x)  # noqa: F841
            return F.mse_loss(self.net(x), x.flatten(1))

    return M(), *digits()


@bug("misspelled-hook")
def hook_of_another_name():
    """on_training_epoch_end is no hook, so the schedule of a weight never moves."""

    class M(LossOnly):
        weight = 0.0

        def loss(self, x, y):
            out = self(x)
            return F.cross_entropy(out, y) + self.weight * out.square().mean()

        def on_training_epoch_end(self):
            self.weight += 0.1

    return M(), *digits()


# Signs


@bug("loss-maximized")
def loss_negated():
    class M(LossOnly):
        def loss(self, x, y):
            return -F.cross_entropy(self(x), y)

    return M(), *digits()


@bug("loss-maximized")
def optimizer_maximizes():
    """maximize=True was kept from a reward."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3, maximize=True)

    return M(), *digits()


@bug("loss-maximized")
def likelihood_without_minus():
    """The mean log-probability of the labels is returned, not its negative."""

    class M(LossOnly):
        def loss(self, x, y):
            return self(x).log_softmax(1).gather(1, y[:, None]).mean()

    return M(), *digits()


@bug("penalty-sign")
def kl_of_wrong_sign():
    """The divergence of a variational autoencoder is subtracted."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), mlp(8, 32, 64)

        def loss(self, x, y):
            mean, log_var = self.encoder(x).chunk(2, 1)
            z = mean + (log_var / 2).exp() * torch.randn_like(mean)
            kl = 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
            return F.mse_loss(self.decoder(z), x.flatten(1)) + 1e-3 * kl

    return M(), *digits()


@bug("penalty-sign")
def weight_penalty_of_wrong_sign():
    class M(LossOnly):
        def loss(self, x, y):
            penalty = sum(p.pow(2).sum() for p in self.parameters())
            return F.cross_entropy(self(x), y) - 1e-4 * penalty

    return M(), *digits()


@bug("deviation")
def variance_for_deviation():
    """Noise is multiplied by exp(log_var), the variance."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), mlp(8, 32, 64)

        def loss(self, x, y):
            mean, log_var = self.encoder(x).chunk(2, 1)
            z = mean + log_var.exp() * torch.randn_like(mean)
            kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
            return F.mse_loss(self.decoder(z), x.flatten(1)) + 1e-3 * kl

    return M(), *digits()


# Masks, sequences


@bug("mask-inverted")
def mask_inverted():
    """True means valid in the batch, and padding in key_padding_mask."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed = nn.Linear(16, 4), nn.Embedding(20, 16)
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def loss(self, batch):
            hidden = self.embed(batch["input_ids"]) + torch.arange(10)[:, None] / 10
            hidden = self.encoder(hidden, src_key_padding_mask=batch["attention_mask"].bool())
            return F.cross_entropy(self.net(hidden[:, 0]), batch["labels"])

        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch)}

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))

    return M(), *_dicts()


def _dicts():
    g = torch.Generator().manual_seed(0)
    x, lengths = torch.randint(1, 20, (640, 10), generator=g), torch.randint(3, 10, (640,), generator=g)
    mask = (torch.arange(10) < lengths[:, None]).long()
    rows = [
        {"input_ids": a, "attention_mask": b, "labels": c} for a, b, c in zip(x * mask, mask, x[:, 0] % 4, strict=True)
    ]
    return loaders(rows[:480], rows[480:])


@bug("masked-matters")
def mask_not_read():
    """The mean over time includes what the mask of the batch leaves out."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 4), nn.GRU(5, 16, batch_first=True)

        def loss(self, x, lengths, y):
            return F.cross_entropy(self.net(self.body(x)[0][:, -1]), y)

    x, y = sequences()
    lengths = torch.randint(5, 13, (len(x),), generator=torch.Generator().manual_seed(0))
    return M(), *halves(x * (torch.arange(12) < lengths[:, None])[..., None], lengths, y)


@bug("order-ignored")
def no_positions():
    """A transformer without positions, whose mean over tokens ignores their order."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.embed = nn.Linear(16, 2), nn.Embedding(12, 16)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)

        def forward(self, x):
            return self.net(self.encoder(self.embed(x)).mean(1))

    x = tokens()
    return M(), *halves(x, (x[:, 0] > x[:, -1]).long())


@bug("hidden-unused")
def hidden_state_not_passed():
    """A GRUCell gets zeros at each time."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.cell = nn.Linear(16, 4), nn.GRUCell(5, 16)

        def forward(self, x):
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], torch.zeros(len(x), 16))
            return self.net(h)

    return M(), *halves(*sequences())


@bug("state-carried")
def hidden_state_kept_between_batches():
    """The state of the last batch is the first of the next one, of other, shuffled sequences."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body, self.state = nn.Linear(16, 4), nn.GRU(5, 16, batch_first=True), None

        def loss(self, x, y):
            out, state = self.body(x, self.state if self.state is not None and self.training else None)
            self.state = state.detach()
            return F.cross_entropy(self.net(out[:, -1]), y)

    return M(), *halves(*sequences())


@bug("future-leak")
def mask_of_the_past():
    """triu where tril is meant: each token sees only what follows."""

    class M(Causal):
        def forward(self, x):
            hidden = self.embed(x) + self.places(torch.arange(x.shape[1]))
            mask = torch.tril(torch.ones(x.shape[1], x.shape[1]), -1).bool()
            return self.net(self.body(hidden, mask=mask))

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("class-dimension", "misaligned", "mixing")
def classes_are_time():
    """Logits (N, T, C) go to cross_entropy as they are, as T = C."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 12), nn.GRU(5, 16, batch_first=True)

        def forward(self, x):
            return self.net(self.body(x)[0])

    x, _ = sequences()
    return M(), *halves(x, (x[..., 0] * 2).long().clamp(0, 3))


@bug("softmax-of-batch")
def softmax_over_samples_by_hand():
    """A hand-written cross-entropy whose softmax is over dim 0."""

    class M(LossOnly):
        def loss(self, x, y):
            p = torch.softmax(self(x), dim=0)
            return -(F.one_hot(y, 10) * torch.log(p + 1e-8)).sum(1).mean()

    return M(), *digits()


@bug("not-log")
def log_softmax_over_pixels():
    """nll_loss of log_softmax over the rows of pictures."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

        def loss(self, x, y):
            return F.nll_loss(F.log_softmax(self(x), dim=2), y)

    return M(), *halves(*segments(), split=240)


# Contrastive learning, copies of networks


@bug("self-similarity")
def self_similarity_kept():
    """NT-Xent without leaving out the similarity of a sample to itself."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
            z = F.normalize(self.net(views), dim=1)
            return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(len(x)))

    return M(), *digits()


@bug("pair-target")
def labels_of_pairs_are_zero():
    """The positive pairs are on the diagonal, the targets are zeros, as of MoCo."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.second = mlp(64, 64, 16), mlp(64, 64, 16)

        def loss(self, x, y):
            a, b = F.normalize(self.net(x), dim=1), F.normalize(self.second(x.flip(-1)), dim=1)
            logits = a @ b.T / 0.1
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return M(), *digits()


@bug("flat-logits")
def temperature_multiplied():
    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.second = mlp(64, 64, 16), mlp(64, 64, 16)

        def loss(self, x, y):
            a, b = F.normalize(self.net(x), dim=1), F.normalize(self.second(x.flip(-1)), dim=1)
            logits, target = a @ b.T * 0.07, torch.arange(len(x))
            return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    return M(), *digits()


@bug("no-stop-gradient")
def siamese_without_detach():
    """SimSiam whose targets have a gradient, so all outputs become the same."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.predictor = mlp(64, 64, 16), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))

        def loss(self, x, y):
            one, two = self.net(x + 0.1 * torch.randn_like(x)), self.net(x + 0.1 * torch.randn_like(x))
            p, q = self.predictor(one), self.predictor(two)
            return -(F.cosine_similarity(p, two).mean() + F.cosine_similarity(q, one).mean()) / 2

    return M(), *digits()


class Q(LossOnly):
    """Q-learning from stored transitions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self, state):
        with torch.no_grad():
            return self.target_net(state).amax(1)

    def loss(self, batch):
        q = self.net(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
        goal = batch["reward"] + 0.9 * (1 - batch["done"]) * self.follow(batch["next_state"])
        return F.smooth_l1_loss(q, goal)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))


class Copied(Q):
    """Its target follows slowly."""

    def on_train_batch_end(self, *args):
        for p, q in zip(self.target_net.parameters(), self.net.parameters(), strict=True):
            p.lerp_(q.data, 0.05)


def transitions(count=640):
    g = torch.Generator().manual_seed(0)
    state = torch.randn(count, 4, generator=g)
    action = torch.randint(0, 3, (count,), generator=g)
    after = state + 0.3 * torch.randn(count, 4, generator=g) + action[:, None] / 3
    reward, done = after[:, 0].tanh(), (after[:, 1] > 1).float()
    names = ("state", "action", "next_state", "reward", "done")
    rows = [dict(zip(names, row, strict=True)) for row in zip(state, action, after, reward, done, strict=True)]
    return loaders(rows[:480], rows[480:])


@bug("average-unchanged")
def target_network_never_copied():
    return Q(), *transitions()


@bug("same-network")
def target_network_is_the_network():
    """The target is assigned, not copied."""

    class M(Q):
        def __init__(self):
            super().__init__()
            self.target_net = self.net

    return M(), *transitions()


@bug("target-gradient")
def target_has_a_gradient():
    """The value of the next state is of the same network, with its gradient."""

    class M(Q):
        def __init__(self):
            super().__init__()
            self.target_net = None

        def follow(self, state):
            return self.net(state).max(dim=1).values

    return M(), *transitions()


@bug("unused-part")
def end_of_episode_ignored():
    class M(Copied):
        def loss(self, batch):
            q = self.net(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
            return F.mse_loss(q, batch["reward"] + 0.9 * self.follow(batch["next_state"]))

    return M(), *transitions()


@bug("average-copies")
def decay_of_average_inverted():
    """The average takes 99.9% of the new weights."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, *args):
            for a, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                a.mul_(1 - 0.999).add_(p.data, alpha=0.999)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self.ema(batch[0]), batch[1]))

    return M(), *digits()


@bug("foreign-gradient")
def discriminator_trains_generator():
    """Samples are not detached, and gradients of the generator are cleared before, not after, that."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net, self.generator = mlp(64, 32, 1), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            opt_g, opt_d = self.optimizers()
            real, fake = batch[0].flatten(1), self.generator(torch.randn(len(batch[0]), 8))
            opt_g.zero_grad()
            opt_d.zero_grad()
            loss = F.softplus(-self.net(real)).mean() + F.softplus(self.net(fake)).mean()
            self.manual_backward(loss)
            opt_d.step()
            self.manual_backward(F.softplus(-self.net(self.generator(torch.randn(len(real), 8)))).mean())
            opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.net)]

    return M(), *digits()


# Modes and layers


@bug("frozen-statistics")
def statistics_of_frozen_body_move():
    """A frozen body is in training mode, so its BatchNorm follows the new data."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(16, 10)
            self.backbone = nn.Sequential(*list(Convnet())[:-2]).requires_grad_(False)

        def forward(self, x):
            return self.net(self.backbone(x))

    return M(), *digits()


@bug("teacher-in-training")
def teacher_with_dropout():
    """The frozen teacher of a distillation is in training mode."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
            self.teacher.requires_grad_(False)

        def loss(self, x, y):
            with torch.no_grad():
                soft = self.teacher(x).softmax(1)
            return F.cross_entropy(self(x), soft)

    return M(), *digits()


@bug("train-in-validation")
def part_trains_in_validation():
    """Validation puts the body into training mode."""

    class M(Base):
        def network(self):
            return Convnet()

        def validation_step(self, batch, batch_idx):
            self.net.train()
            super().validation_step(batch, batch_idx)

    return M(), *digits()


@bug("dropout-in-validation")
def dropout_made_in_forward():
    """nn.Dropout()(x) in forward is always in training mode."""

    class M(Base):
        def forward(self, x):
            return self.net[3](nn.Dropout(0.3)(self.net[:3](x)))

    return M(), *digits()


@bug("unregistered")
def layer_made_in_forward():
    """A new nn.Linear in each pass."""

    class M(Base):
        def forward(self, x):
            return self.net(nn.Linear(64, 64)(x.flatten(1)).relu())

    return M(), *digits()


@bug("no-activation")
def no_activations():
    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10))

    return M(), *digits()


@bug("barely-trained", "tiny-update")
def sigmoids_without_gradient():
    """Ten sigmoids by SGD: the first layers get almost no gradient."""

    class M(Base):
        def network(self):
            body = [layer for _ in range(9) for layer in (nn.Linear(32, 32), nn.Sigmoid())]
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), *body, nn.Linear(32, 10))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return M(), *digits()


# Optimizers, schedules, constants


@bug("schedule-dropped")
def schedule_not_returned():
    """A schedule is made, and only the optimizer is returned."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), self.lr)
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
            return optimizer

    return M(), *digits()


@bug("schedule-restarts", max_epochs=10)
def cosine_of_half_the_training():
    """T_max is half of the epochs, so the rate rises again to its peak."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), self.lr)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]

    return M(), *digits(count=160)


@bug("momentum", "huge-update")
def momentum_of_one():
    class M(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=1.0)

    return M(), *digits()


@bug("decay", "collapse")
def coupled_decay():
    """Adam with weight_decay=10 instead of 1e-3."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=10)

    return M(), *digits()


@bug("label-smoothing")
def smoothing_is_the_share_kept():
    class M(LossOnly):
        def loss(self, x, y):
            return F.cross_entropy(self(x), y, label_smoothing=0.9)

    return M(), *digits()


@bug("swapped-arguments")
def target_before_prediction():
    class M(LossOnly):
        def network(self):
            return nn.Sequential(mlp(64, 64, 1), nn.Sigmoid())

        def loss(self, x, y):
            labels = (y > 4).float().clamp(0.01, 0.99)  # or the gradient is not finite, and the next step an error
            return F.binary_cross_entropy(labels, self(x)[:, 0])

    return M(), *digits()


# Data and metrics


@bug("target-column")
def label_is_a_column():
    """A column of the table is the class."""
    x, y = next(iter(DataLoader(digits(loaded=False)[0], 640)))
    x = torch.cat([x.flatten(1), y[:, None].float()], 1)

    class M(Base):
        def network(self):
            return mlp(65)

    return M(), *halves(x, y)


@bug("window-overlap")
def windows_split_at_random():
    """Windows that overlap are divided at random, so each of validation has neighbours in training."""
    g = torch.Generator().manual_seed(0)
    series = torch.randn(900, generator=g).cumsum(0) * 0.1
    windows = series.unfold(0, 13, 1)[torch.randperm(888, generator=g)]

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    return M(), *halves(windows[:, :12].clone(), windows[:, 12].clone(), split=700)


@bug("constant-target")
def target_is_constant():
    """The wrong column of the file is read: it has one value."""
    x, _ = next(iter(diabetes()[0]))
    x = x.repeat(20, 1) + 0.1 * torch.randn(640, 10)
    return Table(), *halves(x, torch.full((640,), 1.5))


@bug("scaled-twice")
def divided_by_255_twice():
    x = torch.randint(0, 256, (640, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    return M(), *halves(x / 255 / 255, (x[:, 0].mean((1, 2)) / 64).long())


class Augmented(Dataset):
    """Pictures with random flips and noise."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def __getitem__(self, i):
        x, y = self.part[i]
        return (x.flip(-1) if torch.rand(()) < 0.5 else x) + 0.1 * torch.randn_like(x), y


@bug("augmented-validation")
def validation_is_augmented():
    """Both splits have the transform of training."""
    train, val = digits(loaded=False)
    return Base(), *loaders(Augmented(train), Augmented(val))


@bug("metric-shared")
def metric_of_both_splits():
    """One accuracy for training and validation, logged as an object."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(10)

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.accuracy(out, batch[1])
            self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
            return F.cross_entropy(out, batch[1])

        def validation_step(self, batch, batch_idx):
            self.accuracy(self(batch[0]), batch[1])
            self.log("val/acc", self.accuracy)

    return M(), *digits()


@bug("threshold-of-logits")
def threshold_of_logits():
    """Logits are compared with 0.5."""

    class M(LossOnly):
        def network(self):
            return mlp(64, 64, 1)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y > 4).float())

        def validation_step(self, batch, batch_idx):
            x, y = batch[0], (batch[1] > 4).float()
            logits = self(x).squeeze(1)
            self.log("val/loss", F.binary_cross_entropy_with_logits(logits, y))
            self.log("val/acc", ((logits > 0.5).float() == y).float().mean())

    return M(), *digits()


@bug("misaligned-batch")
def labels_sorted_in_collate():
    """collate_fn sorts the samples by size, and leaves the labels as they were."""
    train, val = digits(loaded=False)

    def collate(rows):
        x, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        return x[x.flatten(1).sum(1).argsort(descending=True)], y

    return Base(), *loaders(train, val, collate_fn=collate)


@bug("same-order")
def same_order_in_each_epoch():
    """A sampler that seeds its own generator in each epoch."""

    class Order(torch.utils.data.Sampler):
        def __len__(self):
            return 640

        def __iter__(self):
            return iter(torch.randperm(640, generator=torch.Generator().manual_seed(0)).tolist())

    train, val = digits(loaded=False)
    return Base(), DataLoader(train, 32, sampler=Order()), DataLoader(val, 32)


@bug("unused-part")
def weights_of_samples_ignored():
    """The batch has a weight for each sample, which the loss does not read."""
    x, y = next(iter(DataLoader(digits(loaded=False)[0], 640)))
    weight = torch.rand(640, generator=torch.Generator().manual_seed(0))
    rows = [{"image": a, "label": b, "sample_weight": c} for a, b, c in zip(x, y, weight, strict=True)]

    class M(Base):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["image"]), batch["label"])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self(batch["image"]), batch["label"]))

    return M(), *loaders(rows[:480], rows[480:])
