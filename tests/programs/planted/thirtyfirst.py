"""A state that each call gives, overlaps of logits, neighbours, lessons and bodies that are thawed."""

import copy

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from programs import Base, LossOnly, bug, digits, halves, loaders, segments
from programs.planted.thirtieth import encoder, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Begun(Base):
    """Begins with the encoder of another network, which all calls give."""

    def __init__(self, state=None):
        super().__init__()
        self.encoder, self.net = encoder(), nn.Linear(64, 10)
        if state is not None:
            self.encoder.load_state_dict(state, strict=False)

    def forward(self, x):
        return self.net(self.encoder(x))


@bug("loads-nothing")
def keys_of_a_given_state_have_another_prefix():
    return Begun(trained()), *digits()


class Marked(LossOnly):
    """Finds the marked pixels of pictures, by their overlap, too."""

    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(self, x, y):
        out, y = self(x)[:, 0], (y > 0).float()
        return F.binary_cross_entropy_with_logits(out, y) + dice_loss(self.shares(out), y)

    def shares(self, out):
        return out.sigmoid()


def dice_loss(p, t):
    return (1 - (2 * (p * t).sum((1, 2)) + 1) / (p.sum((1, 2)) + t.sum((1, 2)) + 1)).mean()


@bug("overlap-of-logits")
def overlap_gets_logits():
    class Net(Marked):
        def shares(self, out):
            return out

    return Net(), *halves(*segments(), split=240)


class Found(Base):
    """Rates the class of the nearest neighbour of each digit."""

    def on_validation_epoch_start(self):
        self.kept = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.kept.append((F.normalize(self(x), dim=1), y))

    def on_validation_epoch_end(self):
        z, y = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        self.log("val/recall", (y[self.nearest(z @ z.T)] == y).float().mean())

    def nearest(self, alike):
        return alike.fill_diagonal_(-2).argmax(1)


@bug("self-retrieval")
def each_digit_is_its_own_neighbour():
    class Net(Found):
        def nearest(self, alike):
            return alike.argmax(1)

    return Net(), *digits()


class Lessons(L.LightningDataModule):
    """Digits, which have more noise from epoch to epoch."""

    def train_dataloader(self):
        x, y = digits(loaded=False)[0].tensors
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x + 0.02 * self.trainer.current_epoch * noise, y), 32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(digits(loaded=False)[1], 32)


@bug("loader-of-first-epoch")
def lessons_stay_those_of_the_first_epoch():
    return Base(), Lessons(), None


class Thaw(BaseFinetuning):
    """Trains the body from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(pl_module.body)


class ThawAll(Thaw):
    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer)


class Headed(Base):
    """A body and a head, of which the optimizer gets what is trained."""

    def __init__(self):
        super().__init__()
        self.body, self.net = encoder(), nn.Linear(64, 10)

    def forward(self, x):
        return self.net(self.body(x))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@bug("thawed", callbacks=lambda: [Thaw()])
def thawed_body_is_in_no_optimizer():
    return Headed(), *digits()


def recorded(seed, count):
    """Waves of 4 channels, as an array of times, channels and trials."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    t = np.arange(24)[:, None, None]
    wave = np.sin((0.3 + 0.3 * y) * t + rng.uniform(0, 6, (4, count)))
    return wave + 0.2 * rng.normal(size=wave.shape), y


def trials_first(wave):
    return np.transpose(wave, (2, 1, 0))


class Waves(Base):
    """Tells the frequency of waves."""

    def network(self):
        first = nn.Conv1d(4, 16, 7), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten()
        return nn.Sequential(*first, nn.Linear(64, 3))


def waves(order):
    (x, y), (v, w) = recorded(0, 480), recorded(1, 160)
    parts = [torch.tensor(order(part), dtype=torch.float32) for part in (x, v)]
    return loaders(*(TensorDataset(p, torch.tensor(q)) for p, q in zip(parts, (y, w), strict=True)))


class OwnAverage(Base):
    """Validates an average of its weights, which its own hooks move."""

    decay = 0.98

    def __init__(self):
        super().__init__()
        self.decay = type(self).decay
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for p, q in zip(self.mean.parameters(), self.net.parameters(), strict=True):
            p.lerp_(q, 1 - self.decay)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.follow()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.mean(x).argmax(1) == y).float().mean())


@bug("average-per-epoch")
def own_average_moves_in_validations_only():
    class Net(OwnAverage):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

        def on_validation_start(self):
            self.follow()

    return Net(), *digits()


class Looking(Base):
    """Looks at its predictions from time to time."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 12 == 11:
            self.eval()
            self.last = self(batch[0]).detach()
            self.go_on()

    def go_on(self):
        self.train()


@bug("eval-in-training")
def own_hook_leaves_the_mode_of_evaluation():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx % 12 == 11:
                self.eval()
                self.last = self(batch[0]).detach()

    return Net(), *digits()
