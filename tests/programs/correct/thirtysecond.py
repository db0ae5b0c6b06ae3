"""The programs of ``thirtyfirst.py`` and ``thirtysecond.py`` of ``planted`` without their bugs."""

import numpy as np
import torch
from programs import Base, digits, halves, loaders, no_bug, segments
from programs.planted import thirtyfirst as planted
from torch import nn
from torch.utils.data import TensorDataset


def recorded(seed, count):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    t = np.arange(24)[:, None, None]
    wave = np.sin((0.3 + 0.3 * y) * t + rng.uniform(0, 6, (4, count)))
    return wave + 0.2 * rng.normal(size=wave.shape), y


def trials_first(wave):
    count = wave.shape[-1]
    return np.transpose(wave, (2, 1, 0)).reshape(count, 4, 24)


class Waves(Base):
    """Tells the frequency of waves."""

    def network(self):
        first = nn.Conv1d(4, 16, 7), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten()
        return nn.Sequential(*first, nn.Linear(64, 3))


@no_bug()
def trials_are_put_first_by_a_transpose():
    (x, y), (v, w) = recorded(0, 480), recorded(1, 160)
    parts = [torch.tensor(trials_first(part), dtype=torch.float32) for part in (x, v)]
    return Waves(), *loaders(*(TensorDataset(p, torch.tensor(q)) for p, q in zip(parts, (y, w), strict=True)))


@no_bug()
def overlap_gets_shares():
    return planted.Marked(), *halves(*segments(), split=240)


@no_bug()
def digits_have_other_neighbours():
    return planted.Found(), *digits()


@no_bug()
def second_nearest_of_each_digit_is_taken():
    class Net(planted.Found):
        def nearest(self, alike):
            return alike.topk(2).indices[:, 1]

    return Net(), *digits()


@no_bug(reload_dataloaders_every_n_epochs=1)
def lessons_are_made_for_each_epoch():
    return Base(), planted.Lessons(), None


@no_bug(callbacks=lambda: [planted.ThawAll()])
def thawed_body_gets_a_group():
    return planted.Headed(), *digits()
