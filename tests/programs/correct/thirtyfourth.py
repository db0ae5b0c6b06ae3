"""Programs that look wrong only if one does not ask what their steps and loaders really do."""

import torch
from programs import Base, LossOnly, digits, loaders, mlp, no_bug
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate


@no_bug()
def unknown_classes_of_validation_are_masked():
    class Net(Base):
        def network(self):
            return mlp(outputs=8)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/loss", F.cross_entropy(self(x)[y >= 0], y[y >= 0]))

    (x, y), (held_x, held_y) = (part.tensors for part in digits(loaded=False))
    order = (held_y >= 8).int().argsort(stable=True)  # the first batch has none
    held_x, held_y = held_x[order], torch.where(held_y < 8, held_y, -1)[order]
    return Net(), *loaders(TensorDataset(x[y < 8], y[y < 8]), TensorDataset(held_x, held_y))


class Pairs(LossOnly):
    def loss(self, x, other, is_same):
        distance = (self(x) - self(other)).abs().mean(1)
        return F.binary_cross_entropy_with_logits(2 - distance, is_same)


def pair(samples):
    x, y = default_collate(samples)
    order = torch.randperm(len(x))
    return x, x[order], (y == y[order]).float()


@no_bug()
def collate_makes_pairs_and_whether_they_are_alike():
    return Pairs(), *(DataLoader(part, 64, shuffle=True, collate_fn=pair) for part in digits(loaded=False))
