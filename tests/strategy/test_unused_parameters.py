from pathlib import Path

import pytest
import torch
from conftest import Script, max_difference
from torch import nn

from boltcutter.strategy.unused_parameters import reachable

ENV = {"PYTHONPATH": "tests"}
QUICK = ["logger=null", "report=false", "test=false", "trainer.max_epochs=3"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
FIND = "+trainer.strategy.find_unused_parameters=true"


def branches(kind: str) -> list[str]:
    settings = ["task._target_=third_party.published.Branches", f"+task.kind={kind}"]
    return [*settings, f"data={Path(__file__).parents[1]}/third_party/configs/data/images.yaml", "callback=null"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["true", "false"])
def test_unused_parameters_are_found_in_the_first_step(script: Script, tmp_path: Path, memory: str) -> None:
    for name, more in (("found", []), ("set", [FIND])):
        settings = [*QUICK, *TWO, f"trainer.strategy.shared_memory={memory}", *more, "callback=default"]
        done = script("train", *branches("rank"), *settings, f"folder={tmp_path}/{name}", ranks=2, env=ENV)
        assert done.returncode == 0, done.stderr
        assert ("heads.1.weight" in done.stdout or "on another rank" in done.stdout) == (not more)
    assert max_difference(tmp_path / "found", tmp_path / "set") == 0


def test_a_later_step_that_leaves_out_parameters_is_an_error(script: Script, tmp_path: Path) -> None:
    done = script("train", *branches("later"), *QUICK, *TWO, f"folder={tmp_path}/run", ranks=2, env=ENV)
    assert done.returncode == 1
    assert FIND in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "frozen"])
def test_parameters_that_the_graph_hides_or_that_are_unfrozen_are_averaged(
    script: Script, tmp_path: Path, kind: str
) -> None:
    data = "data.batch_size={}"
    for name, more in (("one", [data.format(32)]), ("two", [*TWO, data.format(16)])):
        settings = [*branches(kind), *QUICK, *more, "callback=default", f"folder={tmp_path}/{name}"]
        done = script("train", *settings, ranks=2 if name == "two" else 0, env=ENV)
        assert done.returncode == 0, done.stderr
        assert "does not use all parameters" not in done.stdout
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def test_the_graph_of_a_loss_lists_its_parameters() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    assert reachable(used(torch.ones(1, 2)).sum()) == set(used.parameters())
    assert not reachable(unused(torch.ones(1, 2)).sum().detach())


TWO_LOSSES = """
import lightning as L, torch, torch.distributed as dist

class Losses(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        made = self.generator(torch.randn(8, 4))
        generator, discriminator = self.optimizers()
        for optimizer, inputs in ((generator, made), (discriminator, made.detach())):
            optimizer.zero_grad()
            self.manual_backward(self.discriminator(inputs).square().mean())
            optimizer.step()
        sums = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(sums, sum(p.detach().sum() for p in self.parameters()))
        assert sums[0] == sums[1], sums

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.generator, self.discriminator)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["true", "false"])
def test_a_second_loss_of_the_first_step_may_leave_out_parameters(script: Script, tmp_path: Path, memory: str) -> None:
    (tmp_path / "losses.py").write_text(TWO_LOSSES)
    (tmp_path / "task.yaml").write_text("# Two losses.\n_target_: losses.Losses\n")
    settings = [f"task={tmp_path}/task.yaml", "callback=null", "trainer.gradient_clip_val=null", *QUICK, *TWO]
    settings += [f"trainer.strategy.shared_memory={memory}", f"folder={tmp_path}/run"]
    done = script("train", *settings, ranks=2, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "(generator.weight, generator.bias)" in done.stdout
