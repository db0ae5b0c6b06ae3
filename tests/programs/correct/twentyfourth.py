"""The programs of ``planted/twentythird.py`` without their bugs, and what looks like them."""

import copy

import torch
from programs import Base, LossOnly, diabetes, digits, halves, loaders, no_bug
from programs.planted.twentythird import (
    Adapted,
    Anchored,
    Domains,
    Federated,
    Forecast,
    GradientReversal,
    Guided,
    Levels,
    Sharp,
    Slices,
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
from torch.utils.data import Subset
from torchmetrics.image import PeakSignalNoiseRatio


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


@no_bug()
def anchor_is_a_copy():
    class Net(Anchored):
        def keep(self):
            self.anchor = {n: p.detach().clone() for n, p in self.net.named_parameters()}

    return Net(), *digits()


@no_bug()
def anchor_is_copied_later():
    class Net(Anchored):
        def __init__(self):
            super().__init__()
            self.anchor = {n: p.detach() for n, p in self.net.named_parameters()}

        def keep(self):
            self.anchor = {n: p.clone() for n, p in self.net.state_dict().items()}

        def on_fit_start(self):
            self.keep()

    return Net(), *digits()


@no_bug()
def anchor_is_another_network():
    class Net(Anchored):
        def __init__(self):
            super().__init__()
            self.first = copy.deepcopy(self.net).requires_grad_(False)

        def keep(self):
            self.anchor = {n: p.detach() for n, p in self.first.named_parameters()}

    return Net(), *digits()


@no_bug()
def two_networks_stay_close():
    class Net(Anchored):
        def __init__(self):
            super().__init__()
            self.second = copy.deepcopy(self.net)
            nn.init.normal_(self.second[1].weight)

        def keep(self):
            self.anchor = {n: p.detach() for n, p in self.second.named_parameters()}

        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step(batch, batch_idx) + F.cross_entropy(self.second(x), y)

    return Net(), *digits()


@no_bug()
def trained_weights_are_kept_for_their_size():
    class Net(Anchored):
        def penalty(self):
            if self.anchor is None:
                return torch.zeros(())
            return sum((1 - self.anchor[n].detach()).square().mean() * p.square().sum() for n, p in self.named())

        def named(self):
            return self.net.named_parameters()

    return Net(), *digits()


@no_bug()
def condition_is_left_out_at_random():
    class Net(Guided):
        def loss(self, x, y):
            x = x.flatten(1)
            given = self.leave_out(y)
            return F.mse_loss(self.net(torch.cat([x + torch.randn_like(x), self.embed(given)], 1)), x)

    return Net(), *digits()


@no_bug()
def values_are_computed_and_not_used():
    class Net(Base):
        def loss(self, x, y):
            flat = x.flatten(1)  # noqa: F841
            scaled = (x - x.mean()) / x.std()  # noqa: F841
            shuffled = x[torch.randperm(len(x))]  # noqa: F841
            other = y[torch.randperm(len(y))]  # noqa: F841
            logits = self(x)
            best = logits.argmax(1)  # noqa: F841
            return F.cross_entropy(logits, y)

    return Net(), *digits()


@no_bug()
def adapted_weights_are_used():
    class Net(Adapted):
        def training_step(self, batch, batch_idx):
            x, y = batch
            fast = self.adapt(x[::2], y[::2])
            return F.mse_loss(torch.func.functional_call(self.net, fast, (x[1::2],))[:, 0], y[1::2])

    return Net(), *diabetes()


@no_bug()
def weights_are_adapted_in_place():
    class Net(Adapted):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def adapt(self, x, y):
            loss = F.mse_loss(self(x)[:, 0], y)
            slopes = torch.autograd.grad(loss, [*self.net.parameters()])
            with torch.no_grad():
                for p, g in zip(self.net.parameters(), slopes, strict=True):
                    p.sub_(g, alpha=0.1)
            return dict(self.net.named_parameters())

        def training_step(self, batch, batch_idx):
            x, y = batch
            before = [p.detach().clone() for p in self.net.parameters()]
            adapted = self.adapt(x[::2], y[::2])  # noqa: F841
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self(x[1::2])[:, 0], y[1::2]))
            with torch.no_grad():
                for p, q in zip(self.net.parameters(), before, strict=True):
                    p.copy_(q)
            optimizer.step()

    return Net(), *diabetes()


@no_bug()
def slices_of_other_patients():
    train, _ = digits(loaded=False)
    data = Slices(*train.tensors)
    return Base(), *loaders(*(Subset(data, range(*each)) for each in ((0, 480), (480, 640))))


@no_bug()
def later_slices_of_each_patient():
    train, _ = digits(loaded=False)
    data = Slices(*train.tensors)
    rows = [[i for i in range(640) if (i % 8 < 6) == is_first] for is_first in (True, False)]
    return Base(), *loaders(*(Subset(data, part) for part in rows))


@no_bug()
def two_subjects_by_trial():
    train, _ = digits(loaded=False)
    data = Slices(*train.tensors)
    data.patient_id = [i % 2 for i in range(640)]
    parts = torch.utils.data.random_split(data, [480, 160], torch.Generator().manual_seed(0))
    return Base(), *loaders(*parts)


@no_bug()
def subjects_are_inputs():
    class Personal(Slices):
        def __init__(self, x, y):
            super().__init__(x, y)
            self.subject = [i % 20 for i in range(len(x))]
            del self.patient_id

        def __getitem__(self, i):
            return *super().__getitem__(i), self.subject[i]

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.of = nn.Embedding(20, 10)

        def loss(self, x, y, subject):
            return F.cross_entropy(self(x) + self.of(subject), y)

    data = Personal(*digits(loaded=False)[0].tensors)
    parts = torch.utils.data.random_split(data, [480, 160], torch.Generator().manual_seed(0))
    return Net(), *loaders(*parts)


@no_bug()
def metric_with_a_peak_of_bytes_gets_bytes():
    class Net(Sharp):
        def __init__(self):
            super().__init__()
            self.rated = PeakSignalNoiseRatio(data_range=255.0)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = (x + self.net(x)).clamp(0, 1)
            self.rated(255 * out, 255 * y)
            self.log("val/psnr", self.rated)
            self.log("val/error", (out - y).abs().mean())

    return Net(), *noisy_digits()
