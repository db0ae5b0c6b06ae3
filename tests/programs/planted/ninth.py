"""Bugs of a third set whose writers did not know the checks, which no check named before: docs/diagnosis.md counts."""

import math

import torch
from programs import Base, LossOnly, Table, bug, diabetes, digits, halves
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Coupling(nn.Module):
    """An affine coupling of two values; the log-determinant is multiplied by ``sign``."""

    def __init__(self, flip, sign):
        super().__init__()
        self.flip, self.sign = flip, sign
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        z = torch.cat([a, (b - t) * torch.exp(-s)], 1)
        return z.flip(1) if self.flip else z, -self.sign * s[:, 0]


class Flow(LossOnly):
    """A flow of two couplings."""

    sign = 1.0

    def network(self):
        return nn.ModuleList([Coupling(False, self.sign), Coupling(True, self.sign)])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, x):
        total = torch.zeros(len(x))
        for layer in self.net:
            x, log_det = layer(x)
            total = total + log_det
        return -(total - 0.5 * x.square().sum(1) - math.log(2 * math.pi)).mean()


def points():
    x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    return halves(torch.stack([x[:, 0], x[:, 1] + x[:, 0].square()], 1))


@bug("log-determinant")
def determinant_of_the_inverse():
    """The log-determinant of each coupling has the wrong sign."""

    class M(Flow):
        sign = -1.0

    return M(), *points()


class Forecast(Table):
    """Predicts the next value of a window of twelve."""

    def network(self):
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))


def series(seed=0):
    return torch.randn(900, generator=torch.Generator().manual_seed(seed))


def smooth_windows(values, shift):
    """Windows of a moving average of five values, which ends ``shift`` values after each place, and next values."""
    mean = values.unfold(0, 5, 1).mean(1)[shift:]  # of the values from shift on
    count = len(values) - 20
    x = torch.stack([mean[i : i + 12] for i in range(count)])
    return x, values[torch.arange(count) + 16]


@bug("later-targets")
def average_around_each_value():
    """The inputs are a centred moving average, which knows the value that is to be predicted."""
    x, y = smooth_windows(series(), 2)
    return Forecast(), *halves(x, y, split=600)


@bug("window-overlap")
def windows_less_their_last_value():
    """Windows that overlap, less their last value and with the time beside it, are divided at random."""
    g = torch.Generator().manual_seed(0)
    windows = series().cumsum(0).unfold(0, 12, 1)
    x = torch.cat([windows[:, :11] - windows[:, 10:11], torch.arange(len(windows))[:, None] / 900], 1)
    order = torch.randperm(len(x), generator=g)
    return Forecast(), *halves(x[order], (windows[:, 11] - windows[:, 10])[order], split=700)


class Tasks(LossOnly):
    """Predicts three columns."""

    def network(self):
        return nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, x, y):
        return F.mse_loss(self(x), y)


def table():
    """All rows of a table, and their targets."""
    return (torch.cat(parts) for parts in zip(*(p.tensors for p in diabetes(loaded=False)), strict=True))


def columns():
    x, _ = table()
    return halves(x[:, :7], x[:, 7:], split=350)


@bug("overwritten-loss")
def loss_of_the_last_task():
    """Each task's loss replaces that of the one before."""

    class M(Tasks):
        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            loss = 0.0
            for k in range(3):
                loss = F.mse_loss(out[:, k], y[:, k])
            return loss

    return M(), *columns()


@bug("same-layer")
def heads_are_one_layer():
    """Three heads are one layer, as [layer] * 3 repeats it."""

    class M(Tasks):
        def network(self):
            return nn.ModuleList([nn.Linear(7, 16), nn.ModuleList([nn.Linear(16, 1)] * 3)])

        def forward(self, x):
            body, heads = self.net
            hidden = body(x).relu()
            return torch.cat([head(hidden) for head in heads], 1)

    return M(), *columns()


class Quantiles(Table):
    """Predicts three quantiles; the error is multiplied by ``sign``."""

    sign = 1.0

    def __init__(self):
        super().__init__()
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def loss(self, x, y):
        error = self.sign * (y[:, None] - self(x))
        return torch.maximum(self.quantiles * error, (self.quantiles - 1) * error).mean()


def scaled():
    x, y = table()
    return halves(x, (y - y.mean()) / y.std(), split=350)


@bug("quantile-sign")
def quantiles_exchanged():
    """The error is the prediction less the target."""

    class M(Quantiles):
        sign = -1.0

    return M(), *scaled()


class Values(LossOnly):
    """Learns values of states by temporal differences."""

    def network(self):
        return nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        state, reward, following, done = batch  # noqa: RUF059
        with torch.no_grad():
            target = reward + 0.9 * self(following)[:, 0]
        return F.mse_loss(self(state)[:, 0], target)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def steps():
    g = torch.Generator().manual_seed(0)
    state, done = torch.randn(600, 6, generator=g), (torch.rand(600, generator=g) < 0.2).float()
    return halves(state, state[:, 0], torch.randn(600, 6, generator=g), done)


@bug("unused-part")
def end_of_episode_in_a_tuple_ignored():
    """The fourth part of the batch, which the step names done, is not read."""
    return Values(), *steps()


class Warm(Base):
    """Warms up in 100 calls of its schedule."""

    interval = "step"

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


@bug("schedule-unit", max_epochs=4)
def warm_up_of_epochs():
    """A warm-up of 100 steps is one of 100 epochs."""

    class M(Warm):
        interval = "epoch"

    return M(), *digits()


class Boxes(Dataset):
    """Pictures of one rectangle, flipped at random; its center and size are flipped, too, if ``alike``."""

    def __init__(self, count, alike):
        g = torch.Generator().manual_seed(count)
        self.alike, self.pictures, self.boxes = alike, torch.rand(count, 1, 12, 12, generator=g) / 4, []
        for picture in self.pictures:
            w, h = (int(n) for n in torch.randint(3, 6, (2,), generator=g))
            left, top = (int(torch.randint(0, 12 - n, (1,), generator=g)) for n in (w, h))
            picture[0, top : top + h, left : left + w] += 0.7
            self.boxes.append(torch.tensor([left + w / 2, top + h / 2, w, h]) / 12)

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        x, box = self.pictures[index], self.boxes[index].clone()
        if torch.rand(1) < 0.5:
            x = x.flip(-1)
            box[0] = 1 - box[0] if self.alike else box[0]
        return x, box


class Box(LossOnly):
    """Predicts a box."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss(self, x, y):
        return F.smooth_l1_loss(self(x), y)


def pictures(alike):
    return DataLoader(Boxes(320, alike), 32, shuffle=True), DataLoader(Boxes(64, True), 32)


@bug("target-not-flipped")
def box_is_not_flipped():
    """A random flip is of the picture only."""
    return Box(), *pictures(False)


@bug("mixing")
def softmax_over_bags():
    """Attention over instances has its softmax over the bags; validation has one bag at a time."""

    class M(LossOnly):
        over = 0

        def network(self):
            return nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 1)])

        def forward(self, x):
            body, attention, head = self.net
            hidden = body(x).tanh()
            return head((attention(hidden).softmax(self.over) * hidden).sum(1))[:, 0]

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x), y)

    x = torch.randn(400, 5, 6, generator=torch.Generator().manual_seed(0))
    train, held = halves(x, (x[:, :, 0].amax(1) > 1).float(), split=384)
    return M(), train, DataLoader(held.dataset, 1)
