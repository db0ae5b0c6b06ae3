"""The programs of ``planted/eighteenth.py`` without their bugs, and others that look like them."""

import torch
from programs import Base, Table, diabetes, digits, loaders, no_bug
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def with_gaps(*tables):
    """Two targets for each sample, of which 30% are missing."""
    found = []
    for seed, (x, y) in enumerate(table.tensors for table in tables):
        t, g = torch.stack([y, -y], 1), torch.Generator().manual_seed(seed)
        found.append(TensorDataset(x, t.masked_fill(torch.rand(t.shape, generator=g) < 0.3, float("nan"))))
    return found


class Rows(torch.utils.data.Dataset):
    """Samples of a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Two(Table):
    """Predicts two values of a table."""

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


@no_bug()
def momentum_is_named():
    class Net(Base):
        def network(self):
            norm = nn.BatchNorm1d(64, 1e-2, 0.2)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 10))

    return Net(), *digits()


@no_bug()
def missing_values_are_left_out_afterwards():
    class Net(Two):
        def loss(self, x, y):
            known = ~y.isnan()
            return torch.where(known, (self(x) - y.nan_to_num(-9.0)).square(), 0.0).sum() / known.sum()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@no_bug()
def missing_values_weigh_nothing():
    class Net(Two):
        def loss(self, x, y):
            weights = (~y.isnan()).float()
            errors = F.smooth_l1_loss(self(x), y.nan_to_num(-1.0), reduction="none")
            return (errors * weights).mean() / weights.mean()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@no_bug()
def samples_are_mixed_with_the_second_half_of_a_list():
    class Pairs(Rows):
        def __len__(self):
            return len(self.rows) // 2

        def __getitem__(self, i):
            (x, y), (u, _) = self.rows[i], self.rows[i + len(self)]
            return x + 0.1 * u, y

    return Base(), *loaders(*(Pairs([*part]) for part in digits(loaded=False)))


@no_bug()
def every_third_of_a_list_begins_a_sample():
    class Threes(Rows):
        def __len__(self):
            return len(self.rows) // 3

        def __getitem__(self, i):
            return torch.stack([self.rows[3 * i + k][0] for k in range(3)]).mean(0), self.rows[3 * i][1]

    return Base(), *loaders(*(Threes([*part]) for part in digits(loaded=False)))


@no_bug()
def length_is_bounded_by_a_constant():
    class Few(Rows):
        def __len__(self):
            return min(len(self.rows), LIMIT)

    return Base(), *loaders(*(Few([*part]) for part in digits(loaded=False)))


LIMIT = 200
