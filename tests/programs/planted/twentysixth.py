"""Gradients that are NaN or infinite where the loss is a number, and methods that a subclass extends."""

import torch
from programs import Base, LossOnly, bug, digits
from torch import nn
from torch.nn import functional as F


class Distances(LossOnly):
    """Pairs of digits of one class are near, and others at a distance of 4 or more."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    def distances(self, z):
        return (z[:, None] - z[None]).pow(2).sum(-1).sqrt()

    def loss(self, x, y):
        apart, same = self.distances(self(x)), y[:, None] == y[None]
        return torch.where(same, apart.square(), (4 - apart).clamp(min=0).square()).mean()


@bug("nonfinite-gradient")
def distance_of_each_to_itself():
    return Distances(), *digits()


@bug("nonfinite-gradient")
def norm_to_the_power_of_a_half():
    class Net(Distances):
        def distances(self, z):
            return ((z[:, None] - z[None]) ** 2).sum(-1) ** 0.5

    return Net(), *digits()


class Norms(LossOnly):
    """Rows of digits, of which those with little ink are left out."""

    def network(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))

    def loss(self, x, y):
        rows = x.reshape(-1, 8, 8)
        ink = rows.mean(-1) > rows.mean()
        z = self.net(rows) * ink[..., None]
        out = F.pad(self.lengths(z, ink), (0, 2)) + z.mean(1)[:, :10]
        return F.cross_entropy(out, y)

    def lengths(self, z, ink):
        return torch.where(ink, z.square().sum(-1).sqrt(), torch.zeros(()))


@bug("nonfinite-gradient")
def branch_that_where_leaves_out():
    return Norms(), *digits()


@bug("nonfinite-gradient")
def angle_of_each_with_itself():
    class Net(Distances):
        def distances(self, z):
            z = F.normalize(z, dim=-1)
            return torch.acos((z @ z.mT).clamp(-1, 1))

    return Net(), *digits()


@bug("nonfinite-gradient")
def not_a_number_from_the_sixth_step():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            loss = F.cross_entropy(out, y)
            if self.training and self.global_step >= 5:
                loss = loss + 0.1 * (out - out.detach()).norm(dim=1).mean() + 0.1 * (out - out).square().sum().sqrt()
            return loss

    return Net(), *digits()


class Bounded(LossOnly):
    """Digits with noise."""

    def bounded(self, x):
        x = x + 0.1
        x.clamp(0, 1)
        return x

    def loss(self, x, y):
        return F.cross_entropy(self(self.bounded(x)), y)


@bug("no-effect")
def result_is_dropped_in_a_method_that_is_extended():
    class Net(Bounded):
        def bounded(self, x):
            return super().bounded(x) * 0.9

    return Net(), *digits()
