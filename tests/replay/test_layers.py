import lightning as L
import torch
from torch import nn

from boltcutter.replay.layers import Layers


def test_norms_of_layers_are_compared_with_the_steps_before() -> None:
    module = L.LightningModule()
    module.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    layers = Layers(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(8):
        layers.begin()
        module.net(torch.ones(4, 2) * (100.0 if step == 7 else 1 + 0.01 * step)).sum().backward()
        layers.before_step()
        optimizer.step()
        optimizer.zero_grad()
        layers.after_step(step)
    first, last = layers.table()
    assert [first["layer"], last["layer"]] == ["net.0", "net.2"]
    assert first["z"]["activation"] > 6
    assert first["activation"] > 10
    assert all(row[name] is not None for row in (first, last) for name in ("gradient", "weight", "update"))
    assert not module.net[0]._forward_hooks
