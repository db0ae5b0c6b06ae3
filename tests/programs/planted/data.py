"""Bugs of the data."""

import numpy as np
import torch
from programs import Base, Table, bug, diabetes, digits, loaders
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


@bug("overlap")
def shuffled_before_split():
    """Training samples are taken after a shuffle, validation before it (marin#2700)."""

    x, y = digits(960, 1, loaded=False)[0].tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return Base(), *loaders(TensorDataset(x[order][:640], y[order][:640]), TensorDataset(x[640:], y[640:]))


@bug("unseen-classes")
def sorted_split():
    """The samples are sorted by class when they are split."""

    x, y = digits(960, 1, loaded=False)[0].tensors
    order = y.argsort()
    return Base(), *loaders(
        TensorDataset(x[order][:640], y[order][:640]), TensorDataset(x[order][640:], y[order][640:])
    )


@bug("one-class-batches")
def sorted_not_shuffled():
    """Samples are sorted by class, and the loader does not shuffle."""

    train, val = digits(loaded=False)
    x, y = train.tensors
    order = y.argsort()
    return Base(), DataLoader(TensorDataset(x[order], y[order]), 16), DataLoader(val, 32)


@bug("split-scale")
def val_not_scaled():
    """Only training pixels are divided by 16."""

    train, val = digits(loaded=False)
    return Base(), *loaders(train, TensorDataset(val.tensors[0] * 16, val.tensors[1]))


class Noisy(Dataset):
    """Adds noise from a generator of its own."""

    def __init__(self, samples):
        self.samples, self.rng = samples, np.random.default_rng(0)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        x, y = self.samples[i]
        return x + torch.tensor(self.rng.normal(0, 0.1, x.shape), dtype=torch.float32), y


@bug("worker-generator")
def same_noise_in_workers():
    """Each worker has a copy of the dataset's generator."""

    train, val = digits(loaded=False)
    return Base(), DataLoader(Noisy(train), 32, shuffle=True, num_workers=2), DataLoader(val, 32)


class Stream(IterableDataset):
    """Yields samples, the same in each worker and rank."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@bug("workers-same-data")
def stream_in_workers():
    """An IterableDataset that does not divide its samples over workers."""

    train, val = digits(loaded=False)
    return Base(), DataLoader(Stream(train), 32, num_workers=2), DataLoader(val, 32)


@bug("in-place")
def scaled_in_place():
    """Training_step divides the batch in place, which is the dataset itself."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.loss(x.div_(2), y)

    train, val = digits(loaded=False)
    batches = [(train.tensors[0][i : i + 32], train.tensors[1][i : i + 32]) for i in range(0, 640, 32)]
    return M(), DataLoader(batches, batch_size=None, shuffle=True), DataLoader(val, 32)


@bug("target-column")
def target_column():
    """One column of the table is the target."""

    train, val = diabetes(loaded=False)
    with_target = [
        TensorDataset(torch.cat([d.tensors[0][:, 1:], d.tensors[1][:, None]], 1), d.tensors[1]) for d in (train, val)
    ]

    class M(Table):
        pass

    return M(), *loaders(*with_target)


@bug("at-chance")
def rows_misaligned():
    """Labels are sorted, samples are not."""

    train, val = digits(loaded=False)
    order = torch.randperm(640, generator=torch.Generator().manual_seed(3))
    return Base(), *loaders(TensorDataset(train.tensors[0], train.tensors[1][order]), val)


@bug("constant-input", "same-output")
def integer_division():
    """Pixels // 255 are all 0."""

    train, val = digits(loaded=False)
    parts = [TensorDataset((d.tensors[0] * 255) // 256, d.tensors[1]) for d in (train, val)]
    return Base(), *loaders(*parts)


@bug("shared-augmentation")
def augmented_validation():
    """Random_split of a dataset with random augmentation."""

    train, _ = digits(loaded=False)

    class Augmented(Dataset):
        def __len__(self):
            return len(train)

        def __getitem__(self, i):
            x, y = train[i]
            return (x + torch.randn_like(x) * 0.3).roll(int(torch.randint(-1, 2, ())), -1), y

    parts = torch.utils.data.random_split(Augmented(), [480, 160], torch.Generator().manual_seed(0))
    return Base(), *loaders(*parts)
