"""Arrays whose axes a function of the file reshapes, as it would move them."""

import numpy as np
import torch
from programs import Base, bug, loaders
from torch import nn
from torch.utils.data import TensorDataset


def recorded(seed, count):
    """Waves of 4 channels, as an array of times, channels and trials."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    t = np.arange(24)[:, None, None]
    wave = np.sin((0.3 + 0.3 * y) * t + rng.uniform(0, 6, (4, count)))
    return wave + 0.2 * rng.normal(size=wave.shape), y


def trials_first(wave):
    return np.transpose(wave, (2, 1, 0))


def trials_by_reshape(wave):
    count = wave.shape[-1]
    return wave.reshape(count, 4, 24)


class Waves(Base):
    """Tells the frequency of waves."""

    def network(self):
        first = nn.Conv1d(4, 16, 7), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten()
        return nn.Sequential(*first, nn.Linear(64, 3))


def waves(order):
    (x, y), (v, w) = recorded(0, 480), recorded(1, 160)
    parts = [torch.tensor(order(part), dtype=torch.float32) for part in (x, v)]
    return loaders(*(TensorDataset(p, torch.tensor(q)) for p, q in zip(parts, (y, w), strict=True)))


@bug("reshape-not-transpose")
def trials_are_put_first_by_a_reshape():
    return Waves(), *waves(trials_by_reshape)
