from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.project import Project
from boltcutter_planning.check import main

PROJECT = Project.find(__file__)
BARE = "_target_: lightning.pytorch.trainer.Trainer\naccelerator: cpu\ndevices: 1\nmax_epochs: 1\n"


def output(tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """Lines that a check prints."""
    main(PROJECT, [*overrides, f"runs={tmp_path}", "logger=null", "model=linear"])
    return capsys.readouterr().out.splitlines()


def test_the_default_gives_up_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(tmp_path, capsys) == ["ok"]


@pytest.mark.parametrize(
    ("overrides", "names", "remedy"),
    [
        (["callback=early_stopping"], ["preemption", "reseed", "guard"], "callback=[default,early_stopping]"),
        (["callback=null"], ["preemption", "reseed", "guard"], "callback=default"),
        (["callback.preemption=null"], ["preemption"], "remove callback.preemption=null"),
        (["callback.reseed=null"], ["reseed"], "remove callback.reseed=null"),
        (["callback.guard=null"], ["guard"], "remove callback.guard=null"),
    ],
)
def test_missing_callbacks_are_named(
    overrides: list[str], names: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_ = output(tmp_path, capsys, *overrides)
    assert [name for name in ("preemption", "reseed", "guard") if f"callback.{name}," in first] == names
    assert remedy in first


def test_an_own_default_option_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "default.yaml").write_text("bar: {_target_: lightning.pytorch.callbacks.TQDMProgressBar}\n")
    cfg = read_config(PROJECT, [f"callback={tmp_path}/default.yaml", "logger=null", f"folder={tmp_path}/run"])
    assemble(cfg)
    assert "write 'defaults: default' in your callback/default.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["trainer.plugins=null", "trainer={}/bare.yaml"])
def test_missing_atomic_checkpoints_are_named(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.yaml").write_text(BARE)
    first, *_ = output(tmp_path, capsys, override.format(tmp_path))
    assert first.startswith("note: trainer.plugins has no ${checkpoint_io}")
    assert "write 'defaults: default' or 'plugins: [${checkpoint_io}]'" in first


def test_a_run_says_it_first(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, "model=linear", "callback=early_stopping", f"folder={tmp_path}/run", "test=false")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("note: callback=early_stopping: without callback.preemption, Ctrl-C")
