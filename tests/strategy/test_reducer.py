from pathlib import Path

import pytest
import torch
from conftest import Script, max_difference
from torch import nn

from boltcutter.strategy.reducer import has_sparse_gradients, reachable, unsynchronized_buffers

ENV = {"PYTHONPATH": "tests"}
QUICK = ["logger=null", "report=false", "test=false", "trainer.max_epochs=3"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
FIND = "+trainer.strategy.find_unused_parameters=true"


def branches(kind: str) -> list[str]:
    settings = ["task._target_=third_party.published.Branches", f"+task.kind={kind}"]
    return [*settings, f"data={Path(__file__).parents[1]}/third_party/configs/data/images.yaml", "callback=null"]


@pytest.mark.parametrize(("kind", "memory"), [("rank", "true"), ("rank", "false"), ("later", "true")])
def test_unused_parameters_are_found_in_any_step(script: Script, tmp_path: Path, kind: str, memory: str) -> None:
    for name, more in (("found", []), ("set", [FIND])):
        settings = [*QUICK, *TWO, f"trainer.strategy.shared_memory={memory}", *more, "callback=default"]
        done = script("train", *branches(kind), *settings, f"folder={tmp_path}/{name}", ranks=2, env=ENV)
        assert done.returncode == 0, done.stderr
        assert ("heads.1.weight" in done.stdout or "on another rank" in done.stdout) == (not more)
    assert max_difference(tmp_path / "found", tmp_path / "set") == 0


def test_without_shared_memory_a_later_step_that_leaves_out_parameters_is_an_error(
    script: Script, tmp_path: Path
) -> None:
    settings = [*QUICK, *TWO, "trainer.strategy.shared_memory=false", f"folder={tmp_path}/run"]
    done = script("train", *branches("later"), *settings, ranks=2, env=ENV)
    assert done.returncode == 1
    assert FIND in done.stderr
    assert "Traceback" not in done.stderr


def test_parameters_that_the_graph_hides_are_used(script: Script, tmp_path: Path) -> None:
    data = "data.batch_size={}"
    for name, more in (("one", [data.format(32)]), ("two", [*TWO, data.format(16)])):
        settings = [*branches("checkpoint"), *QUICK, *more, "callback=default", f"folder={tmp_path}/{name}"]
        done = script("train", *settings, ranks=2 if name == "two" else 0, env=ENV)
        assert done.returncode == 0, done.stderr
        assert "does not use all parameters" not in done.stdout
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def test_constant_buffers_and_batch_norm_statistics_are_not_broadcast() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(3))
            self.register_buffer("constant", torch.ones(1), persistent=False)
            self.norm = nn.BatchNorm1d(3)

    statistics = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(unsynchronized_buffers(Codebook())) == {"constant", *statistics}
    assert unsynchronized_buffers(nn.Linear(3, 3)) == []


def test_sparse_gradients_are_averaged_by_the_process_group() -> None:
    assert has_sparse_gradients(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    assert not has_sparse_gradients(nn.Embedding(3, 2))


def test_the_graph_of_a_loss_lists_its_parameters() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    assert reachable(used(torch.ones(1, 2)).sum()) == set(used.parameters())
    assert not reachable(unused(torch.ones(1, 2)).sum().detach())
