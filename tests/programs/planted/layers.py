"""Bugs of layers and the graph of the loss."""

import numpy as np
import torch
from programs import Base, bug, digits, mlp
from torch import nn


@bug("unregistered")
def layers_in_list():
    """Hidden layers in a Python list (pytorch#59925)."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 32)
            self.hidden = [nn.Linear(32, 32) for _ in range(3)]
            self.net = nn.Linear(32, 10)

        def forward(self, x):
            x = self.first(x.flatten(1)).relu()
            for layer in self.hidden:
                x = layer(x).relu()
            return self.net(x)

    return M(), *digits()


@bug("split-layer")
def norm_in_no_group():
    """Parameter groups by name leave out the scale of a norm."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

        def configure_optimizers(self):
            norms = {id(p) for m in self.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
            decay = [p for n, p in self.named_parameters() if n.endswith("weight") and id(p) not in norms]
            rest = [p for n, p in self.named_parameters() if n.endswith("bias")]
            return torch.optim.AdamW(
                [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], 1e-2
            )

    return M(), *digits()


@bug("late-parameter")
def layer_made_late():
    """A layer is created in the first training_step, after configure_optimizers."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = nn.Linear(64, 32), None

        def forward(self, x):
            hidden = self.body(x.flatten(1)).relu()
            if self.net is None:
                self.net = nn.Linear(hidden.shape[1], 10)
            return self.net(hidden)

    return M(), *digits()


@bug("cut-gradient")
def no_grad_backbone():
    """Features are computed under no_grad, which was meant for evaluation only."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)

        @torch.no_grad()
        def features(self, x):
            return self.body(x.flatten(1))

        def forward(self, x):
            return self.net(self.features(x))

    return M(), *digits()


@bug("cut-gradient")
def numpy_round_trip():
    """Activations pass through NumPy."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            hidden = self.body(x.flatten(1)).detach().cpu().numpy()
            return self.net(torch.from_numpy(np.maximum(hidden, 0)).to(self.device))

    return M(), *digits()


@bug("unused-parameter")
def wrong_branch():
    """Two encoders, but the first is applied twice."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)
            self.net = nn.Linear(64, 10)

        def forward(self, x):
            a, b = x.flatten(1).chunk(2, 1)
            return self.net(torch.cat([self.left(a), self.left(b)], 1).relu())

    return M(), *digits()


@bug("nothing-trained")
def leaf_loss():
    """The loss is created anew from its value."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            return torch.tensor(float(self.loss(*batch)), requires_grad=True)

    return M(), *digits()


@bug("same-units")
def zero_init():
    """All weights start at 0, so all units stay the same."""

    class M(Base):
        def __init__(self):
            super().__init__()
            for p in self.parameters():
                nn.init.constant_(p, 0.01)

    return M(), *digits()


@bug("initial-loss")
def temperature():
    """Logits are divided by a temperature of 0.005 that was meant as a factor."""

    class M(Base):
        def forward(self, x):
            return self.net(x) / 0.005

    return M(), *digits()


@bug("dead-layer", "same-output", "huge-update")
def dying_relu():
    """A learning rate of 5 kills all units of a ReLU in the first steps."""

    class M(Base):
        lr = 5.0

    return M(), *digits()


@bug("dropout")
def kept_instead_of_dropped():
    """The share that is kept is given as that which is dropped."""

    class M(Base):
        def network(self):
            return nn.Sequential(*mlp(64, 256)[:3], nn.Dropout(0.98), nn.Linear(256, 10))

    return M(), *digits()
