"""Correct programs that are close to the bugs of ``planted/seventh.py``."""

import torch
from programs import Base, LossOnly, Manual, Table, digits, halves, loaders, no_bug, segments, sequences, tokens
from programs.planted.seventh import (
    Adapter,
    Attention,
    Attentive,
    Averaged,
    Clicks,
    Dropped,
    FlippedPictures,
    Language,
    Metric,
    Segmentation,
    Survival,
    Translator,
    clicks,
    padded,
    patients,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate


@no_bug()
def mask_is_flipped():
    class Both(FlippedPictures):
        both = True

    x, y = segments()
    return Segmentation(), *loaders(Both(x[:240], y[:240]), TensorDataset(x[240:], y[240:]))


@no_bug()
def mask_of_the_padding():
    return Attentive(), *halves(*padded())


@no_bug()
def padding_on_the_left():
    """A mask of padding that is True at the first places."""
    x, y = padded()
    return Attentive(), *halves(x.flip(1), y)


@no_bug()
def decoder_is_shifted():
    x = tokens()
    return Translator(), *halves(x, (x.flip(1) + 1) % 12)


@no_bug()
def hardest_by_infinity():
    return Metric(), *digits()


@no_bug()
def lora_of_layers():
    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Adapter(nn.Linear(64, 32), 0.1), nn.ReLU(), nn.Linear(32, 10))

    return M(), *digits()


@no_bug()
def condition_is_dropped_for_some():
    class M(Dropped):
        share = 0.15

    return M(), *digits(batch=64)


@no_bug()
def tied_and_initialized_in_place():
    x = tokens()
    return Language(), *halves(x[:, :-1], x[:, 1:])


@no_bug()
def tied_only_if_asked():
    """A tie in a branch that is not taken."""

    class M(Language):
        def __init__(self, tied=False):
            super().__init__()
            self.net = nn.Linear(32, 12)
            if tied:
                self.net.weight = self.embed.weight

    x = tokens()
    return M(), *halves(x[:, :-1], x[:, 1:])


@no_bug()
def small_constant_factor():
    """A factor that is small, and not the rate."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 3e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.2)
            return [optimizer], [schedule]

    return M(), *digits()


@no_bug()
def adversary_of_each_other_batch():
    """Two optimizers in turn; the gradients that one leaves in the other's weights are cleared."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(10, 2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()[batch_idx % 2]
            self.optimizers()[0].zero_grad()
            self.optimizers()[1].zero_grad()
            out = self(x)
            loss = F.cross_entropy(out, y) if batch_idx % 2 else F.cross_entropy(self.other(out), y % 2)
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self):
            parts = ([*self.net.parameters(), *self.other.parameters()], self.net.parameters())
            return [torch.optim.SGD(part, 0.05) for part in parts]

    return M(), *digits()


@no_bug()
def average_with_statistics():
    class M(Averaged):
        has_statistics = True

    return M(), *digits()


@no_bug()
def scaled_by_training():
    """Both splits have the mean and the deviation of training."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g) * 3 + 1
    x = (x - x[:480].mean(0)) / x[:480].std(0)
    return Table(), *halves(x, x[:, 0] + x[:, 1] ** 2)


@no_bug()
def adversarial_samples():
    """The gradient of the input, without its graph, is added to the input."""

    class M(Base):
        def loss(self, x, y):
            with torch.enable_grad():
                near = x.clone().requires_grad_(True)
                (direction,) = torch.autograd.grad(F.cross_entropy(self(near), y), near)
                return F.cross_entropy(self((near + 0.05 * direction.sign()).detach()), y) + F.cross_entropy(self(x), y)

    return M(), *digits()


@no_bug()
def first_order_inner_steps():
    """Weights of an inner loop whose gradients have no graph."""

    class M(LossOnly):
        def loss(self, x, y):
            with torch.enable_grad():
                weights = dict(self.net.named_parameters())
                for _ in range(2):
                    out = torch.func.functional_call(self.net, weights, (x[:16],))
                    grads = torch.autograd.grad(F.cross_entropy(out, y[:16]), [*weights.values()])
                    weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
                return F.cross_entropy(torch.func.functional_call(self.net, weights, (x[16:],)), y[16:])

    return M(), *digits()


@no_bug()
def scale_of_quantized_weights():
    """A scale that is computed of p.data, and multiplies."""

    class M(Base):
        def forward(self, x):
            first, last = self.net[1], self.net[3]
            scale = first.weight.data.abs().max() / 7
            weight = first.weight + ((first.weight / scale).round() * scale - first.weight).detach()
            return last(F.linear(x.flatten(1), weight, first.bias).relu())

    return M(), *digits()


@no_bug()
def numbers_of_items():
    return Clicks(), *halves(*clicks("int64"), split=1600)


@no_bug()
def numbers_in_steps_of_100():
    item, y = clicks("int64")
    return Clicks(), *halves(item // 100 * 100, y, split=1600)


@no_bug()
def attention_over_the_keys():
    return Attention(), *halves(*sequences())


@no_bug()
def attention_over_slots():
    """Queries compete for the keys, and the weights of each are normalized."""

    class M(Attention):
        def loss(self, x, y):
            weights = (self.q(x) @ self.k(x).mT / 4).softmax(1)
            weights = weights / weights.sum(-1, keepdim=True)
            return F.cross_entropy(self.net((weights @ self.v(x)).amax(1)), y)

    return M(), *halves(*sequences())


@no_bug()
def angles_in_radians():
    """Sines of large phases, which are computed."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g)
    x[:, 3] = 360 * torch.rand(640, generator=g)

    class M(Table):
        def forward(self, x):
            wind = x[:, 3:4] * torch.pi / 180
            return self.net(torch.cat([x[:, :3], wind.sin(), wind.cos(), x[:, 5:]], 1))

    return M(), *halves(x, x[:, 0] + torch.deg2rad(x[:, 3]).sin())


@no_bug()
def risk_sets_of_the_future():
    return Survival(), *halves(*patients())


@no_bug()
def risk_sets_by_flipping():
    """An ascending order, of which the sums are from the end."""

    class M(Survival):
        def loss(self, x, time, event):
            order = torch.argsort(time)
            hazard, event = self(x)[:, 0][order], event[order]
            risk = torch.logcumsumexp(hazard.flip(0), 0).flip(0)
            return -((hazard - risk) * event).sum() / event.sum()

    return M(), *halves(*patients())


@no_bug()
def sorted_by_the_loader():
    """Batches are sorted by time when they are collated."""

    class M(Table):
        def loss(self, x, time, event):
            hazard = self(x)[:, 0]
            return -((hazard - torch.logcumsumexp(hazard, 0)) * event).sum() / event.sum()

    def collate(rows):
        return default_collate(sorted(rows, key=lambda row: -row[1]))

    parts = [part.dataset for part in halves(*patients())]
    return M(), *(DataLoader(part, 32, collate_fn=collate) for part in parts)


@no_bug()
def places_of_validation_are_seeded():
    """What is hidden of each sample of validation is drawn by a seed, and the state restored."""

    class M(Base):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            state = torch.get_rng_state()
            torch.manual_seed(batch_idx)
            hidden = torch.rand(len(x), 1, 8, 1) < 0.3
            torch.set_rng_state(state)
            self.log("val/loss", F.cross_entropy(self(x * ~hidden), y))

    return M(), *digits()
