import pytest
import torch
from torch import Tensor, nn

from boltcutter.model.mlp import MLP
from boltcutter.strategy.errors import StrategyError
from boltcutter_language.gpt import GPT
from boltcutter_parallel.stage import LocalStage


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_sequence_equal_the_model(tied: bool, count: int) -> None:
    model = GPT((8,), 11, num_layers=3, hidden_size=16, num_heads=2, tie_embeddings=tied, position="learned")
    x = torch.randint(4, (7, 6))
    y: Tensor = x
    for stage in model.stages(count):
        assert any(True for _ in stage.parameters())
        y = stage(y)
    assert torch.equal(y, model(x))


def test_a_rank_keeps_only_its_own_parameters_but_all_names() -> None:
    models = [MLP((6,), 3, hidden_sizes=[5, 5, 5]) for _ in range(2)]
    first, last = (LocalStage(model, rank, 2) for rank, model in enumerate(models))
    names = [name for name, _ in models[0].named_parameters()]
    kept = [{name for name, p in model.named_parameters() if not p.is_meta} for model in models]
    assert kept[0] | kept[1] == set(names)
    assert not kept[0] & kept[1]
    assert [p.shape for p in models[0].parameters()] == [p.shape for p in models[1].parameters()]
    for model, stage in zip(models, (first, last), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        stage.module(torch.randn(2, 6 if stage.first else 5)).sum().backward()
        optimizer.step()
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(names)
        assert len(optimizer.state) == len(stage.weights) == 4


class Incomplete(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def stages(self, count: int) -> list[nn.Module]:
        return [self.used] * count

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.unused(self.used(x))
        return output


def test_models_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"no stage of Incomplete has unused\.weight; add it to one"):
        LocalStage(Incomplete(), 0, 1)
    with pytest.raises(StrategyError, match=r"trainer\.devices=3 exceeds .*model=mlp.* try trainer.devices=2"):
        LocalStage(MLP((6,), 3, hidden_sizes=[5]), 0, 3)
    with pytest.raises(
        StrategyError, match=r"trainer\.devices=3 exceeds model\.num_layers=2, .* try trainer.devices=2"
    ):
        LocalStage(GPT((8,), 11, num_layers=2, hidden_size=16, num_heads=2), 0, 3)
