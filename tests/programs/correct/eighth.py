"""Correct programs that are close to the bugs of ``planted/ninth.py``."""

import torch
from programs import Table, digits, halves, no_bug
from programs.planted.ninth import (
    Box,
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
