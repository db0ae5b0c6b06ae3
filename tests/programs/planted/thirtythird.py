"""Ends of episodes without a name, targets in validation, subjects that are not read, schedules of batches."""

import math

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from programs import Base, LossOnly, bug, digits, halves
from programs.planted.ninth import Values, steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@bug("unused-part")
def ends_of_episodes_have_no_name():
    class M(Values):
        """The fourth part of the batch tells ends."""

        def training_step(self, batch, batch_idx):
            state, reward, next_state, _ = batch
            with torch.no_grad():
                target = reward + 0.9 * self(next_state)[:, 0]
            return F.mse_loss(self(state)[:, 0], target)

    return M(), *steps()


class Forecaster(LossOnly):
    """Forecasts eight values of a series one by one; in training it gets the true ones before each."""

    validates_with_targets = True

    def __init__(self):
        super().__init__()
        self.encoder, self.cell = nn.GRU(1, 16, batch_first=True), nn.GRUCell(1, 16)

    def network(self):
        return nn.Linear(16, 1)

    def forward(self, past, future=None):
        state, value, found = self.encoder(past[:, :, None])[1][0], past[:, -1:], []
        for time in range(8):
            state = self.cell(value, state)
            found.append(value + self.net(state))
            value = found[-1] if future is None else future[:, time : time + 1]
        return torch.cat(found, 1)

    def loss(self, past, future):
        return F.mse_loss(self(past, future), future)

    def validation_step(self, batch, batch_idx):
        past, future = batch
        forecast = self(past, future) if self.validates_with_targets else self(past)
        self.log("val/mse", F.mse_loss(forecast, future))


def waves():
    g = torch.Generator().manual_seed(0)
    x, noise = [torch.zeros(640), torch.zeros(640)], torch.randn(24, 640, generator=g)
    for time in range(22):
        x.append(1.6 * x[-1] - 0.72 * x[-2] + 0.35 * noise[time])
    x = torch.stack(x, 1)
    return halves(x[:, :16], x[:, 16:])


@bug("forced-in-validation")
def validation_gets_the_values_before():
    return Forecaster(), *waves()


class Recordings(L.LightningDataModule):
    """Windows of 40 subjects, each of which has a state of its own."""

    def load(self):
        rng = np.random.default_rng(0)
        state, subject = np.arange(40) % 2, np.repeat(np.arange(40), 16)
        center = rng.normal(size=(40, 12)) + np.outer(2 * state - 1, np.arange(12) < 3)
        x = center[subject] + 0.8 * rng.normal(size=(640, 12))
        return torch.tensor(x).float(), torch.tensor(state)[subject], subject

    def setup(self, stage):
        x, y, subject = self.load()  # noqa: RUF059
        held = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)) < 160
        self.train, self.val = TensorDataset(x[~held], y[~held]), TensorDataset(x[held], y[held])

    def train_dataloader(self):
        return DataLoader(self.train, 32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 32)


class OfSubjects(Base):
    def network(self):
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))


@bug("group-overlap")
def subjects_are_in_both_splits():
    return OfSubjects(), Recordings(), None


class OfBatches(Base):
    """Its schedule ends after as many steps as there are batches, or steps."""

    of_batches = True

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        length = self.trainer.max_epochs * (20 if self.of_batches else 5)
        warm = 0.3 * length

        def scale(step):
            if step < warm:
                return (step + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (length - warm))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@bug("schedule-unit", max_epochs=6, accumulate_grad_batches=4)
def schedule_ends_after_all_batches():
    return OfBatches(), *digits()
