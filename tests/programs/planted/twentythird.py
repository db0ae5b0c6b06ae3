"""Reversals that reverse nothing, writes to copies, peaks of another range, and targets that begin too early."""

import torch
from programs import Base, LossOnly, Manual, Table, bug, diabetes, digits, halves, loaders
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.image import PeakSignalNoiseRatio


class GradientReversal(torch.autograd.Function):
    """The identity, with a gradient times a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class Domains(LossOnly):
    """Classifies digits, by features that do not tell the noisy ones."""

    reversal = GradientReversal
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.classes, self.domain = nn.Linear(32, 10), nn.Linear(32, 1)

    def strength(self):
        return self.factor * self.current_epoch / 3

    def training_step(self, batch, batch_idx):
        x, y = batch
        clean, noisy = self.net(x), self.net(x + 0.5 * torch.rand_like(x))
        both = self.reversal.apply(torch.cat([clean, noisy]), self.strength())
        labels = torch.cat([torch.zeros(len(x)), torch.ones(len(x))])
        loss = F.cross_entropy(self.classes(clean), y)
        return loss + F.binary_cross_entropy_with_logits(self.domain(both)[:, 0], labels)

    def loss(self, x, y):
        return F.cross_entropy(self.classes(self.net(x)), y)


@bug("adversaries-agree")
def reversal_passes_gradients_on():
    return Domains(), *digits()


class Stored(LossOnly):
    """Classifies digits, beside those that it has kept."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.rand(100, 1, 8, 8))

    def store(self, rows, x):
        self.kept[rows].copy_(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        rows = torch.randint(100, (len(x),))
        old = self.kept[rows]
        old[torch.rand(len(x)) < 0.1] = 0
        self.store(rows, x)
        return F.cross_entropy(self(x), y) + 1e-3 * self(old).square().mean()


@bug("no-effect")
def rows_of_a_store_are_copied():
    return Stored(), *digits()


@bug("no-effect")
def rows_of_a_store_are_filled_by_two_indices():
    class Net(Stored):
        def store(self, rows, x):
            self.kept[rows][:, 0] = x[:, 0]

    return Net(), *digits()


class Sharp(LossOnly):
    """Removes noise, and rates it by the peak signal-to-noise ratio."""

    peak = 255.0

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(self, x, y):
        return F.mse_loss(x + self.net(x), y)

    def ratio(self, x, y):
        error = (x - y).square().mean()
        return 10 * torch.log10(self.peak**2 / error)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = (x + self.net(x)).clamp(0, 1)
        self.log("val/psnr", self.ratio(out, y))


def noisy_digits():
    train, val = digits(loaded=False)
    x, held = train.tensors[0], val.tensors[0]
    parts = [TensorDataset(t + 0.2 * torch.randn_like(t), t) for t in (x, held)]
    return loaders(*parts)


@bug("psnr-peak")
def peak_of_bytes():
    return Sharp(), *noisy_digits()


@bug("psnr-peak")
def peak_of_bytes_of_each_sample():
    class Net(Sharp):
        def ratio(self, x, y):
            error = (x - y).square().flatten(1).mean(1)
            return (20 * torch.log10(torch.tensor(self.peak)) - 10 * error.log10()).mean()

    return Net(), *noisy_digits()


def grades(count=640):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=g)
    return x, torch.bucketize(x[:, 0] + x[:, 1].relu(), torch.tensor([-0.5, 0.0, 0.5, 1.0]))


class Levels(LossOnly):
    """One question for each of four levels of a grade."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

    def levels(self, y):
        return (y[:, None] >= torch.arange(4)).float()

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self.net(x), self.levels(y))


@bug("ordinal-targets")
def grades_are_at_least_their_level():
    return Levels(), *halves(*grades())


class Windows(torch.utils.data.Dataset):
    """24 times of a series, and the next 4, of which the first is a number of times behind."""

    behind = 1

    def __init__(self, series, channels=1):
        self.series = series if channels > 1 else series[:, 0]

    def __len__(self):
        return len(self.series) - 29

    def __getitem__(self, i):
        begin = i + 24 - self.behind
        return self.series[i : i + 24], self.series[begin : begin + 4]


def walk(count=900):
    g = torch.Generator().manual_seed(0)
    t = torch.arange(count)[:, None]
    return torch.sin(t * torch.tensor([0.3, 0.7])) + 0.3 * torch.randn(count, 2, generator=g)


class Forecast(LossOnly):
    """Predicts the next 4 times of a series."""

    channels = 1

    def __init__(self):
        super().__init__()
        n = self.channels
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(24 * n, 32), nn.ReLU(), nn.Linear(32, 4 * n))

    def loss(self, x, y):
        return F.mse_loss(self.net(x).reshape(y.shape), y)


def windows(kind, channels=1):
    series = walk()
    return loaders(kind(series[:600], channels), kind(series[600:], channels))


@bug("first-target-known")
def future_begins_in_the_window():
    return Forecast(), *windows(Windows)


@bug("first-target-known")
def future_of_two_channels_begins_in_the_window():
    class Net(Forecast):
        channels = 2

    return Net(), *windows(Windows, 2)


class Federated(Manual):
    """Two networks learn of parts of a batch, and are averaged."""

    def copies(self):
        return [self.net] * 2

    def training_step(self, batch, batch_idx):
        x, y = batch
        networks = self.copies()
        for net, part, labels in zip(networks, x.chunk(2), y.chunk(2), strict=True):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            F.cross_entropy(net(part), labels).backward()
            optimizer.step()
        server = self.optimizers()
        server.zero_grad()
        for name, p in self.net.named_parameters():
            p.grad = p.detach() - torch.stack([n.get_parameter(name).detach() for n in networks]).mean(0)
        server.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


@bug("same-layer")
def clients_are_one_network():
    return Federated(), *digits()


def texts(first=0, count=640, vocab=12):
    """Rows of 4 to 16 words whose numbers begin at a number, with 0 behind them, and a class of their mean."""
    g = torch.Generator().manual_seed(0)
    words = torch.randint(vocab, (count, 16), generator=g) + first
    lengths = torch.randint(4, 17, (count,), generator=g)
    words[torch.arange(16) >= lengths[:, None]] = 0
    y = (words[:, :4].float().mean(1) > vocab / 2 + first).long()
    return words, y


class Words(LossOnly):
    """Classifies the mean of words that are not padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 2)

    def loss(self, x, y):
        known = (x != 0).float()[..., None]
        return F.cross_entropy(self.net((self.embed(x) * known).sum(1) / known.sum(1).clamp(min=1)), y)


@bug("padding-is-token")
def first_word_is_padding():
    return Words(), *halves(*texts())


class Anchored(LossOnly):
    """Stays close to the weights that it has at the third epoch."""

    anchor = None

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.keep()

    def keep(self):
        self.anchor = {n: p.detach() for n, p in self.net.named_parameters()}

    def penalty(self):
        if self.anchor is None:
            return torch.zeros(())
        return sum((p - self.anchor[n]).square().sum() for n, p in self.net.named_parameters())

    def training_step(self, batch, batch_idx):
        return self.loss(*batch) + 10 * self.penalty()


@bug("constant-term")
def anchor_is_the_trained_weights():
    return Anchored(), *digits()


@bug("constant-term")
def anchors_in_a_list_are_the_trained_weights():
    class Net(Anchored):
        def keep(self):
            self.anchor = [p.data for p in self.net.parameters()]

        def penalty(self):
            total = torch.zeros(())
            if self.anchor is not None:
                for p, q in zip(self.net.parameters(), self.anchor, strict=True):
                    total = total + F.mse_loss(p, q)
            return total

    return Net(), *digits()


class Guided(LossOnly):
    """Classifies digits of noise and a class, which is left out at random."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64))
        self.embed = nn.Embedding(11, 64)

    def leave_out(self, y):
        return torch.where(torch.rand(y.shape) < 0.2, torch.full_like(y, 10), y)

    def loss(self, x, y):
        x = x.flatten(1)
        given = self.leave_out(y)  # noqa: F841
        return F.mse_loss(self.net(torch.cat([x + torch.randn_like(x), self.embed(y)], 1)), x)


@bug("unused-value")
def condition_that_is_left_out_is_unused():
    return Guided(), *digits()


class Adapted(Table):
    """Adapts its weights to the first half of a batch, and learns of the second one."""

    def adapt(self, x, y):
        fast = dict(self.net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.net, fast, (x,))[:, 0], y)
        slopes = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
        return {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}

    def training_step(self, batch, batch_idx):
        x, y = batch
        fast = self.adapt(x[::2], y[::2])  # noqa: F841
        return F.mse_loss(self(x[1::2])[:, 0], y[1::2])


@bug("unused-value")
def adapted_weights_are_unused():
    return Adapted(), *diabetes()


class Slices(TensorDataset):
    """Pictures of patients, 8 of each."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.patient_id = [f"p{i // 8}" for i in range(len(x))]


@bug("group-overlap")
def slices_of_patients_in_both():
    train, _ = digits(loaded=False)
    data = Slices(*train.tensors)
    parts = torch.utils.data.random_split(data, [480, 160], torch.Generator().manual_seed(0))
    return Base(), *loaders(*parts)


@bug("psnr-peak")
def metric_has_a_peak_of_bytes():
    class Net(Sharp):
        def __init__(self):
            super().__init__()
            self.rated = PeakSignalNoiseRatio(data_range=255.0)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.rated((x + self.net(x)).clamp(0, 1), y)
            self.log("val/psnr", self.rated)

    return Net(), *noisy_digits()
