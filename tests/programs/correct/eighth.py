"""Correct programs that are close to the bugs of ``planted/ninth.py``."""

import torch
from programs import Base, Manual, Table, digits, halves, no_bug
from programs.planted.ninth import (
    Box,
    Coupling,
    Flow,
    Forecast,
    Quantiles,
    Tasks,
    Values,
    Warm,
    columns,
    pictures,
    points,
    scaled,
    series,
    smooth_windows,
    steps,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


@no_bug()
def flow_of_couplings():
    return Flow(), *points()


@no_bug()
def determinant_is_subtracted():
    """Layers return the log-determinant of the inverse, and the loss adds it."""

    class M(Flow):
        sign = -1.0

        def loss(self, x):
            total = torch.zeros(len(x))
            for layer in self.net:
                x, log_det = layer(x)
                total = total - log_det
            return -(total - 0.5 * x.square().sum(1)).mean()

    return M(), *points()


@no_bug()
def average_of_earlier_values():
    x, y = smooth_windows(series(), 0)
    return Forecast(), *halves(x[:, :12], y, split=600)


@no_bug()
def gap_between_values():
    """The value between six earlier and six later ones is filled in."""
    windows = series().cumsum(0).unfold(0, 13, 1)
    x = torch.cat([windows[:, :6], windows[:, 7:]], 1)
    return Forecast(), *halves(x, windows[:, 6].clone(), split=600)


@no_bug()
def loss_of_all_tasks():
    class M(Tasks):
        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            loss = 0.0
            for k in range(3):
                loss = loss + F.mse_loss(out[:, k], y[:, k])
            return loss

    return M(), *columns()


@no_bug()
def loss_of_each_task_in_a_list():
    """The loss of each round is kept before it is replaced."""

    class M(Tasks):
        def training_step(self, batch, batch_idx):
            x, y = batch
            out, found = self(x), []
            for k in range(3):
                loss = F.mse_loss(out[:, k], y[:, k])
                found.append(loss)
            return torch.stack(found).mean()

    return M(), *columns()


@no_bug()
def one_head_for_three_scales():
    """A head that a list has three times gets another input each time."""

    class M(Tasks):
        def network(self):
            bodies = nn.ModuleList(nn.Linear(7, 16) for _ in range(3))
            return nn.ModuleList([bodies, nn.ModuleList([nn.Linear(16, 1)] * 3)])

        def forward(self, x):
            bodies, heads = self.net
            return torch.cat([head(body(x).relu()) for body, head in zip(bodies, heads, strict=True)], 1)

    return M(), *columns()


@no_bug()
def quantiles_in_order():
    return Quantiles(), *scaled()


@no_bug()
def averages_with_a_tau():
    """tau is the rate of an average, and no quantile."""

    class M(Table):
        def __init__(self):
            super().__init__()
            self.tau = 0.9

        def loss(self, x, y):
            return F.l1_loss(self(x)[:, 0], y)

    return M(), *scaled()


@no_bug()
def end_of_episode_in_a_tuple():
    class M(Values):
        def training_step(self, batch, batch_idx):
            state, reward, following, done = batch
            with torch.no_grad():
                target = reward + 0.9 * (1 - done) * self(following)[:, 0]
            return F.mse_loss(self(state)[:, 0], target)

    return M(), *steps()


@no_bug(max_epochs=10)
def warm_up_of_steps():
    return Warm(), *digits()


@no_bug()
def box_is_flipped():
    return Box(), *pictures(True)


@no_bug()
def flow_with_a_condition():
    """A coupling that gets a condition by its name, and only whole batches."""

    class Conditional(Coupling):
        def forward(self, x, *, shift):
            assert len(shift) == len(x) == 32
            z, log_det = super().forward(x)
            return z + shift[:, None], log_det

    class M(Flow):
        def network(self):
            return Conditional(True, 1.0)

        def loss(self, x):
            z, log_det = self.net(x, shift=x.new_ones(len(x)))
            return (0.5 * z.square().sum(1) - log_det).mean()

        def validation_step(self, batch, batch_idx):
            pass

    return M(), *points()


@no_bug()
def one_head_for_parts_of_the_input():
    """A head that a list has three times gets a temporary tensor each time."""

    class M(Tasks):
        def network(self):
            return nn.ModuleList([nn.Sequential(nn.ReLU(), nn.Linear(7, 1))] * 3)

        def forward(self, x):
            return torch.cat([head(x * k) for k, head in enumerate(self.net)], 1)

    return M(), *columns()


@no_bug()
def several_steps_of_a_batch():
    """Manual optimization: a method makes a step in each round of a loop, and the last loss is returned."""

    class M(Manual):
        def update(self, batch):
            optimizer, loss = self.optimizers(), self.loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss.detach()

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                loss = self.update(batch)
            return loss

    return M(), *digits()


@no_bug()
def pairs_validated_one_by_one():
    """A contrastive loss over the samples of a batch; validation is of one sample at a time."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

        def training_step(self, batch, batch_idx):
            a, b = (F.normalize(self(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=1) for _ in range(2))
            return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

        def validation_step(self, batch, batch_idx):
            self.log("val/norm", self(batch[0]).norm())

    train, held = scaled()
    return M(), train, DataLoader(held.dataset, 1)
