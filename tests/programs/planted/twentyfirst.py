"""Schedules in the wrong unit, and more that was missed at first."""

import copy

import lightning as L
import torch
from programs import Base, LossOnly, Manual, bug, digits, halves, loaders, mlp
from sklearn.datasets import make_moons
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


class Patches(LossOnly):
    """Says for each of 16 patches of a picture whether it is brighter than the mean."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Conv2d(1, 24, 2, 2), nn.Linear(24, 24), nn.Linear(24, 1)])

    def rows(self, x):
        """Tokens (N, 16, 24) of what the convolution returns, (N, 24, 4, 4)."""
        return x.flatten(2).transpose(1, 2)

    def loss(self, x, y):
        patches, mix, head = self.net
        bright = F.avg_pool2d(x, 2)[:, 0].flatten(1) > x.mean((2, 3))
        return F.binary_cross_entropy_with_logits(head(mix(self.rows(patches(x))).relu())[..., 0], bright.float())


@bug("reshape-not-transpose")
def channels_are_read_as_patches():
    class Net(Patches):
        def rows(self, x):
            return x.reshape(len(x), -1, x.shape[1])

    return Net(), *digits()


@bug("reshape-not-transpose")
def channels_are_read_as_rows():
    class Net(Patches):
        def rows(self, x):
            return x.view(-1, x.shape[1]).view(len(x), 16, -1)

    return Net(), *digits()


class Coupling(nn.Module):
    """Moves one of two columns by what the other one says."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.net = kept, mlp(1, 16, 2)

    def forward(self, x):
        fixed, moved = x[:, self.kept, None], x[:, 1 - self.kept, None]
        scale, shift = self.net(fixed).tanh().chunk(2, 1)
        both = (fixed, moved * scale.exp() + shift)
        return torch.cat(both if self.kept == 0 else both[::-1], 1), scale[:, 0]


class Flow(LossOnly):
    """Density of two columns."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([Coupling(i % 2) for i in range(4)])

    def total(self, logs):
        return torch.stack(logs).sum(0)

    def loss(self, x, y):
        logs = []
        for layer in self.net:
            x, each = layer(x)
            logs.append(each)
        return (0.5 * x.square().sum(1) - self.total(logs)).mean()


def moons():
    x, y = make_moons(960, noise=0.1, random_state=0)
    return halves(torch.tensor(x, dtype=torch.float32), torch.tensor(y), split=640)


@bug("log-determinant")
def determinants_but_the_last_are_dropped():
    class Net(Flow):
        def total(self, logs):
            return logs[-1]

    return Net(), *moons()


class Adversaries(Manual):
    """A generator of points with a penalty on its weights, and what tells them from points of the data."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(4, 32, 2), mlp(2, 32, 1)

    def judged(self, fake):
        """What the critic gets for the generator's loss."""
        return fake

    def configure_optimizers(self):
        return [Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)]

    def training_step(self, batch, batch_idx):
        (one, two), x = self.optimizers(), batch[0]
        fake = self.generator(torch.randn(len(x), 4))
        real, drawn = self.critic(x), self.critic(fake.detach())
        ones = torch.ones_like(real)
        loss = F.binary_cross_entropy_with_logits(real, ones)
        loss = loss + F.binary_cross_entropy_with_logits(drawn, 0 * ones)
        two.zero_grad()
        self.manual_backward(loss)
        two.step()
        penalty = 1e-4 * sum(p.square().sum() for p in self.generator.parameters())
        loss = F.binary_cross_entropy_with_logits(self.critic(self.judged(fake)), ones) + penalty
        one.zero_grad()
        self.manual_backward(loss)
        one.step()


@bug("adversaries-agree")
def generator_learns_of_its_penalty_only():
    class Net(Adversaries):
        def judged(self, fake):
            return fake.detach()

    return Net(), *moons()


@bug("average-copies")
def average_follows_ever_faster():
    class Average(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.kept = copy.deepcopy(pl_module.net).requires_grad_(False)

        @torch.no_grad()
        def on_train_batch_end(self, trainer, pl_module, *args):
            decay = min(0.99, (1 + trainer.global_step) / (10 + trainer.global_step))
            for slow, fast in zip(self.kept.parameters(), pl_module.net.parameters(), strict=True):
                slow.mul_(1 - decay).add_(fast, alpha=decay)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("val/slow", (self.kept(batch[0]).argmax(1) == batch[1]).float().mean())

    class Net(Base):
        def configure_callbacks(self):
            return [Average()]

    return Net(), *digits()


class Views(Dataset):
    """Two noisy copies of each picture, as one tensor."""

    def __init__(self, pictures, count):
        self.pictures, self.count = pictures, count

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        x = self.pictures[i]
        drawn = [x + 0.3 * torch.randn_like(x) for _ in range(self.count)]
        return torch.stack([drawn[0], drawn[-1]]), i


class Contrastive(LossOnly):
    """The other view of a picture is the nearest."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(self, x, y):
        one, other = F.normalize(self.net(torch.cat([x[:, 0], x[:, 1]])), dim=1).chunk(2)
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


@bug("same-views")
def one_view_is_stacked_twice():
    train, val = digits(loaded=False)
    return Contrastive(), *loaders(Views(train.tensors[0], 1), Views(val.tensors[0], 2))
