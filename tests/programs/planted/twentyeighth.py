"""Targets whose weights are copied into the networks that are trained."""

import copy

import torch
from programs import Base, bug, digits
from torch.nn import functional as F


class Followed(Base):
    """Is drawn to the outputs of a frozen copy, which ``sync`` updates from time to time."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx % 25 == 24:
            self.sync()
        x, y = batch
        out = self.net(x)
        with torch.no_grad():
            aim = self.target(x).softmax(-1)
        return F.cross_entropy(out, y) + 0.1 * F.cross_entropy(out, aim)


@bug("average-copies")
def target_is_copied_into_the_network():
    class Net(Followed):
        def sync(self):
            self.net.load_state_dict(self.target.state_dict())

    return Net(), *digits()


@bug("average-copies")
def parameters_of_a_target_are_copied_into_the_network():
    class Net(Followed):
        @torch.no_grad()
        def sync(self):
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                p.data.copy_(0.1 * p.data + 0.9 * q.data)

    return Net(), *digits()
