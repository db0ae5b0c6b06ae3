"""Validations that compute something else than training, and more that was missed at first."""

import torch
from programs import bug
from programs.planted.tenth import Prototypes
from torch.utils.data import DataLoader, IterableDataset


class Drawn(IterableDataset):
    """Episodes of five classes: a support, and queries, which are drawn anew if not ``apart``."""

    def __init__(self, queries, count, seed, *, apart):
        self.queries, self.count, self.seed, self.apart = queries, count, seed, apart
        g = torch.Generator().manual_seed(seed)
        self.bank = torch.randn(20, 1, 16, generator=g) + 0.5 * torch.randn(20, 12, 16, generator=g)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            support, query = [], []
            for c in torch.randperm(20, generator=g)[:5]:
                first = torch.randperm(12, generator=g)
                then = first[4:] if self.apart else torch.randperm(12, generator=g)
                support.append(self.bank[c, first[:4]])
                query.append(self.bank[c, then[: self.queries]])
            yield torch.stack(support), torch.stack(query)


def episodes(*, apart):
    """Of as many queries as the support has in training, and of more in validation."""
    return tuple(DataLoader(Drawn(*args, apart=apart), 4) for args in ((4, 160, 0), (8, 32, 1)))


@bug("shared-rows")
def query_of_a_validation_is_in_its_support():
    return Prototypes(), *episodes(apart=False)
