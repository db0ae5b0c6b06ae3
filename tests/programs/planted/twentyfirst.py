"""Schedules in the wrong unit, and more that was missed at first."""

import torch
from programs import Base, LossOnly, bug, digits, loaders
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset


class Spots(Dataset):
    """Pictures of a bright spot each, and the place of the spot; pictures are flipped at random."""

    def __init__(self, count, *, train):
        g = torch.Generator().manual_seed(int(train))
        self.at = torch.rand(count, 2, generator=g) * 0.8 + 0.1
        self.noise = 0.1 * torch.rand(count, 1, 16, 16, generator=g)
        self.train = train

    def __len__(self):
        return len(self.at)

    def __getitem__(self, i):
        x, at = self.noise[i].clone(), self.at[i].clone()
        column, row = (at * 15).round().long().tolist()
        x[0, row - 1 : row + 2, column - 1 : column + 2] += 1
        if self.train and torch.rand(()) < 0.5:
            x = self.flipped(x, at)
        return x, at


class Places(LossOnly):
    """Finds the spot."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))

    def loss(self, x, y):
        return F.mse_loss(self.net(x), y)


@bug("schedule-unit", max_epochs=6)
def milestones_in_steps_are_called_per_epoch():
    class Net(Base):
        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-3)
            return [optimizer], [MultiStepLR(optimizer, [120, 180], 0.1)]

    return Net(), *digits(batch=16)


@bug("schedule-dead", max_epochs=8)
def milestones_in_epochs_are_called_per_step():
    class Net(Base):
        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-2)
            schedule = MultiStepLR(optimizer, [4, 6], 0.1)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net(), *digits(batch=32)


@bug("target-not-flipped")
def places_are_not_flipped():
    class Data(Spots):
        def flipped(self, x, at):
            return x.flip(-1)

    return Places(), *loaders(Data(320, train=True), Data(160, train=False))


class Bayes(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.rho = nn.Parameter(torch.full((outputs, inputs), -4.0))

    def forward(self, x):
        deviation = F.softplus(self.rho)
        self.weight = self.mean + deviation * torch.randn_like(self.mean)
        posterior = torch.distributions.Normal(self.mean, deviation).log_prob(self.weight).sum()
        self.divergence = posterior - torch.distributions.Normal(0.0, 1.0).log_prob(self.weight).sum()
        return F.linear(x, self.weight)


class Bayesian(LossOnly):
    def __init__(self, divided_by):
        super().__init__()
        self.divided_by = divided_by
        self.net = nn.Sequential(nn.Flatten(), Bayes(64, 32), nn.ReLU(), Bayes(32, 10))

    def loss(self, x, y):
        fit = F.cross_entropy(self.net(x), y)
        return fit + (self.net[1].divergence + self.net[3].divergence) / self.divided_by


@bug("divergence-weight")
def divergence_is_divided_by_batches():
    return Bayesian(20), *digits()
