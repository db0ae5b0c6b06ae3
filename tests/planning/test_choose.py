import pytest
import torch

from boltcutter.assembly.assemble import complete_config
from boltcutter.config.compose import compose
from boltcutter.config.settings import Settings
from boltcutter.planning import choose
from boltcutter.planning.choose import StrategyEstimate, estimate_strategies, recommend
from boltcutter.planning.estimate import Memory
from boltcutter.project import Project

DIGITS = (torch.empty(1, 1, 8, 8, dtype=torch.uint8), torch.empty(1, dtype=torch.int64))

PROJECT = Project.find(__file__)


def config(*overrides: str) -> Settings:
    return complete_config(compose(PROJECT, [*overrides, "logger=null"]))


@pytest.mark.slow
def test_memory_of_each_strategy() -> None:
    found = {
        row.overrides: row.memory
        for row in estimate_strategies(config("model=mlp", f"model.hidden_sizes={[256] * 8}"), DIGITS, 4)
    }
    one, ddp = found["trainer=default trainer.devices=1"], found["trainer=ddp trainer.devices=4"]
    fsdp = found["trainer=fsdp2 trainer.devices=4"]
    tensor = found["trainer=fsdp2 trainer.devices=4 trainer.strategy.tensor_parallel_size=4"]
    both = found["trainer=fsdp2 trainer.devices=4 trainer.strategy.tensor_parallel_size=2"]
    for memory in (one, ddp, fsdp, tensor, both):
        assert isinstance(memory, Memory)
    assert isinstance(one, Memory)
    for memory in (fsdp, tensor, both):
        assert isinstance(memory, Memory)
        for name in ("weights", "gradients", "optimizer"):
            assert getattr(memory, name) == pytest.approx(getattr(one, name) / 4, rel=0.02), name
        assert memory.peak < one.peak
    assert isinstance(ddp, Memory)
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (one.weights, one.gradients, one.optimizer)
    assert ddp.activations < one.activations
    pipeline = found["trainer=pipeline trainer.devices=4"]
    assert isinstance(pipeline, Memory)
    assert pipeline.peak < one.peak
    assert pipeline.weights < 0.4 * one.weights
    assert not torch.distributed.is_initialized()


def test_a_batch_that_does_not_divide_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "estimate_step", lambda cfg, sample, size, **options: memory(size))
    found = [
        (row.overrides, row.memory) for row in estimate_strategies(config("model=mlp", "data.batch_size=10"), DIGITS, 4)
    ]
    assert found[0] == ("trainer=default trainer.devices=1", memory(10))
    assert found[1] == ("trainer=ddp trainer.devices=4 data.batch_size=12", memory(3))


def memory(peak: int) -> Memory:
    return Memory(1, 1, 1, 1, peak)


FOUND = [
    StrategyEstimate("trainer=default trainer.devices=1", memory(100)),
    StrategyEstimate("trainer=ddp trainer.devices=4", memory(80)),
    StrategyEstimate("trainer=fsdp2 trainer.devices=4", memory(40)),
    StrategyEstimate("trainer=fsdp2 trainer.devices=4 trainer.strategy.tensor_parallel_size=4", "cannot be sharded"),
]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (100, "trainer=ddp trainer.devices=4"),
        (80, "trainer=fsdp2 trainer.devices=4"),  # 90 % of the memory is usable
        (
            23,
            "nothing fits; trainer=fsdp2 trainer.devices=4 needs least, 40 B; try trainer.accumulate_grad_batches=3",
        ),
        (3, "nothing fits; trainer=fsdp2 trainer.devices=4 needs least, 40 B, of which 3 B"),
    ],
)
def test_the_simplest_that_fits_is_recommended(size: int, text: str) -> None:
    assert recommend(FOUND, size).startswith(text)
    assert "bf16-true" not in recommend(FOUND, size)  # master weights stay in float32


def test_recommendation_for_one_device() -> None:
    assert recommend(FOUND[:1], 200) == "trainer=default trainer.devices=1"
    assert recommend([StrategyEstimate("trainer=default trainer.devices=1", "?")], 200).startswith(
        "no estimate for this model"
    )
