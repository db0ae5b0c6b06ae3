"""The transformer of Lightning's own demos, on random tokens of 50 kinds: what does `boltcutter audit` say of it?"""

import torch
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset


class Demo(LightningTransformer):
    """As it is, but without the download of its data."""

    def __init__(self) -> None:
        super().__init__(vocab_size=50)

    def prepare_data(self) -> None:
        """Download nothing."""


def tokens() -> DataLoader:
    """Sequences, and the same shifted by one, each of shape (N, 35)."""
    rows = torch.randint(50, (512, 36), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=16, shuffle=True)
