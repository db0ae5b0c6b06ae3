import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from boltcutter.diagnosis.graph import find_holder, read_graph


def test_losses_and_what_feeds_them_are_found_behind_moves() -> None:
    weight = torch.zeros(4, 3, requires_grad=True)
    logits = (torch.ones(2, 5, 4) @ weight).softmax(-1)
    graph = read_graph(F.cross_entropy(logits.transpose(1, 2), torch.ones(2, 5, dtype=torch.long)) * 2)
    (loss,) = graph.losses
    assert (loss.kind, loss.source, loss.before, loss.num_classes) == ("nll_loss", "LogSoftmax", "Softmax", 3)
    assert graph.leaves == [weight]


def test_nothing_is_computed_again_to_read_what_a_checkpoint_left_out() -> None:
    calls = []
    layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def loss_of(x: Tensor) -> Tensor:
        calls.append(1)
        return F.mse_loss(layer(x), torch.zeros(8, 3))

    loss = checkpoint(loss_of, torch.rand(8, 4), use_reentrant=False)
    before = layer[1].running_mean.clone()
    (found,) = read_graph(loss).losses
    assert found.prediction is None
    assert torch.equal(layer[1].running_mean, before)
    loss.backward()
    assert layer[0].weight.grad is not None


def test_the_list_that_holds_a_layer_is_named() -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.hidden = [nn.Linear(1, 1)]
    assert find_holder(module, module.inner.hidden[0].weight) == "inner.hidden"
    assert find_holder(module, nn.Parameter(torch.zeros(1))) is None
