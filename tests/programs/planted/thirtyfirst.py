"""A state that each call gives, overlaps of logits, neighbours, lessons and bodies that are thawed."""

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from programs import Base, LossOnly, bug, digits, halves, segments
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


@bug("own-neighbour")
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
