"""Correct programs that do what modules of public packages do."""

import torch
from programs import Base, no_bug
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def several_series(count=6, length=200):
    time = torch.arange(length)
    rows = [torch.sin(time / (4.0 + i)) for i in range(count)]
    return torch.stack(rows) + 0.1 * torch.randn(count, length, generator=torch.Generator().manual_seed(0))


class Windows(Base):
    """Cuts its windows in the step: of all but the last 24 values in training, and of these in validation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 12))

    def windows(self, series):
        return series.unfold(-1, 36, 1).flatten(0, 1)

    def error(self, windows):
        return F.mse_loss(self.net(windows[..., :24]), windows[..., 24:])

    def training_step(self, batch, batch_idx):
        return self.error(self.windows(batch["series"][:, :-24]))

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.error(self.windows(batch["series"][:, -48:])))


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"series": self.rows[index]}


@no_bug()
def series_are_split_in_the_step():
    rows = Rows(several_series(32))
    return Windows(), DataLoader(rows, 8), DataLoader(rows, 8)


@no_bug()
def series_are_one_sample():
    """All rows of a batch are one multivariate series, whose parts are mixed."""

    class M(Windows):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def windows(self, series):
            return series.unfold(-1, 36, 1).transpose(0, 1)

        def error(self, windows):
            mixed = windows[..., :24] + self.mix(windows[..., :24].transpose(1, 2)).transpose(1, 2)
            return F.mse_loss(self.net(mixed), windows[..., 24:])

    rows = Rows(several_series(8))
    return M(), DataLoader(rows, 8), DataLoader(rows, 8)


class Molecules(Dataset):
    """Chains of 3 to 6 atoms, whose property is the sum of what each atom has with its neighbor."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(3, 7, (200,), generator=generator).tolist()
        self.atoms = [torch.randn(size, 5, generator=generator) for size in sizes]

    def __len__(self):
        return len(self.atoms)

    def __getitem__(self, index):
        atoms = self.atoms[index]
        edges = torch.stack([torch.arange(len(atoms) - 1), torch.arange(1, len(atoms))])
        return atoms, edges, (atoms[1:, 0] * atoms[:-1, 0]).sum()

    @staticmethod
    def collate(molecules):
        starts, count = [], 0
        for atoms, _, _ in molecules:
            starts.append(count)
            count += len(atoms)
        edges = torch.cat([edges + start for (_, edges, _), start in zip(molecules, starts, strict=True)], 1)
        owners = torch.cat([torch.full((len(atoms),), i) for i, (atoms, _, _) in enumerate(molecules)])
        return torch.cat([atoms for atoms, _, _ in molecules]), edges, owners, torch.stack([y for *_, y in molecules])


@no_bug()
def atoms_come_first():
    """The first tensor of a batch has a row for each atom of all molecules."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.of_pairs = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
            self.readout = nn.Linear(16, 1)

        def error(self, batch):
            atoms, edges, owners, y = batch
            messages = self.of_pairs(torch.cat([atoms[edges[0]], atoms[edges[1]]], 1))
            summed = torch.zeros(len(y), 16).index_add(0, owners[edges[1]], messages)
            return F.mse_loss(self.readout(summed).squeeze(1), y)

        def training_step(self, batch, batch_idx):
            return self.error(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.error(batch))

    loaders = [DataLoader(Molecules(seed), 8, collate_fn=Molecules.collate) for seed in (0, 1)]
    return M(), *loaders
