"""The programs of ``planted/twentythird.py`` without their bugs, and what looks like them."""

import copy

import torch
from programs import Base, LossOnly, digits, halves, no_bug
from programs.planted.twentythird import (
    Domains,
    Federated,
    Forecast,
    GradientReversal,
    Levels,
    Sharp,
    Stored,
    Windows,
    Words,
    grades,
    noisy_digits,
    texts,
    windows,
)
from torch import nn
from torch.nn import functional as F


class Reversed(GradientReversal):
    """With the gradient's sign reversed."""

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


@no_bug()
def reversal_reverses_gradients():
    class Net(Domains):
        reversal = Reversed

    return Net(), *digits()


@no_bug()
def reversal_gets_a_negative_factor():
    class Net(Domains):
        factor = -1.0

    return Net(), *digits()


@no_bug()
def rows_of_a_store_are_set():
    class Net(Stored):
        def store(self, rows, x):
            self.kept[rows] = x

    return Net(), *digits()


@no_bug()
def rows_of_a_store_are_changed_and_put_back():
    class Net(Stored):
        def store(self, rows, x):
            found = {"rows": self.kept[rows]}
            found["rows"].mul_(0.5)
            found["rows"][:, 0] += 0.5 * x[:, 0]
            self.kept[rows] = found["rows"]
            self.kept[:50].clamp_(0, 1)
            self.kept[0][0].clamp_(0, 1)

    return Net(), *digits()


@no_bug()
def copies_are_changed_for_the_callbacks():
    class Net(Stored):
        def store(self, rows, x):
            self.shown = {"rows": self.kept[rows]}
            self.shown["rows"][0] = 0
            self.kept[rows] = x

    return Net(), *digits()


@no_bug()
def peak_of_one():
    class Net(Sharp):
        peak = 1.0

    return Net(), *noisy_digits()


@no_bug()
def peak_of_bytes_of_bytes():
    class Net(Sharp):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = (x + self.net(x)).clamp(0, 1)
            self.log("val/psnr", self.ratio((255 * out).round(), (255 * y).round()))
            self.log("val/error", (out - y).abs().mean())

    return Net(), *noisy_digits()


@no_bug()
def grades_are_above_their_level():
    class Net(Levels):
        def levels(self, y):
            return (y[:, None] > torch.arange(4)).float()

    return Net(), *halves(*grades())


@no_bug()
def grades_have_a_level_of_their_own():
    class Net(Levels):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))

        def levels(self, y):
            return (y[:, None] >= torch.arange(5)).float()

    return Net(), *halves(*grades())


@no_bug()
def times_at_which_who_is_seen_lives():
    class Net(Levels):
        def loss(self, x, y, event):
            return F.binary_cross_entropy_with_logits(self.net(x), self.levels(y), weight=event[:, None])

        def training_step(self, batch, batch_idx):
            return self.loss(*batch)

    x, y = grades()
    return Net(), *halves(x, y, (x[:, 2] > -1).float())


class Following(Windows):
    """The next times."""

    behind = 0


@no_bug()
def future_begins_behind_the_window():
    return Forecast(), *windows(Following)


class Labelled(Windows):
    """The next times, and the last ones before them, which a decoder begins with."""

    def __getitem__(self, i):
        return self.series[i : i + 24], self.series[i + 20 : i + 28]


@no_bug()
def decoder_begins_in_the_window():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(24 + 8, 32), nn.ReLU(), nn.Linear(32, 4))

        def loss(self, x, y):
            known = torch.cat([y[:, :4], torch.zeros_like(y[:, 4:])], 1)
            return F.mse_loss(self.net(torch.cat([x, known], 1)), y[:, 4:])

    return Net(), *windows(Labelled)


@no_bug()
def series_is_reconstructed_in_reverse():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 24))

        def loss(self, x, y):
            return F.mse_loss(self.net(x), x.flip(1))

    return Net(), *windows(Following)


@no_bug()
def solution_begins_with_the_last_value():
    class Net(Forecast):
        def loss(self, x, y):
            steps = F.pad(self.net(x)[:, 1:], (1, 0))
            return F.mse_loss(x[:, -1:] + steps.cumsum(1), y)

    return Net(), *windows(Windows)


@no_bug()
def clients_are_copies():
    class Net(Federated):
        def copies(self):
            return [copy.deepcopy(self.net) for _ in range(2)]

    return Net(), *digits()


@no_bug()
def query_is_stacked_for_all_samples():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
            self.query, self.head = nn.Parameter(torch.randn(32)), nn.Linear(32, 10)

        def forward(self, x):
            hidden = self.net(x)
            query = torch.stack([self.query] * len(x))
            return self.head(hidden * (query * hidden).softmax(1) + query.mean(1, keepdim=True))

    return Net(), *digits()


@no_bug()
def words_are_numbered_from_one():
    return Words(), *halves(*texts(first=1))


@no_bug()
def sentences_are_padded_each():
    x, y = texts(first=1, count=1280)
    x[:, :4] = x[:, :4].where(torch.arange(4) < 3, 0)
    return Words(), *halves(x.reshape(640, 32), y.reshape(640, 2).amax(1))


@no_bug()
def words_are_dropped_in_training():
    class Net(Words):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.loss(x.where(torch.rand(x.shape) > 0.05, 0), y)

    return Net(), *halves(*texts(first=1))


@no_bug()
def fields_of_a_board_are_empty():
    class Net(Words):
        def loss(self, x, y):
            return F.cross_entropy(self.net(self.embed(x).mean(1)), y)

    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 3, (640, 16), generator=g)
    x[torch.rand(x.shape, generator=g) < 0.4] = 0
    return Net(), *halves(x, ((x == 1).sum(1) > (x == 2).sum(1)).long())
