from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.analysis.checkpoint import describe, info_command
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

from .conftest import Write

PROJECT = Project.find(__file__)


def save(file: Path, **content: Any) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "epoch": 3, "global_step": 40, **content}, file)
    return str(file)


def test_the_code_of_a_checkpoint_is_named(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "r1", id="r1", library={"commit": "def"}, command="boltcutter train")
    origin = {"run": "r1", "commit": "abc", "dirty": True, "attempt": 2, "command": "train", "data": "e3"}
    file = save(tmp_path / "r1" / "checkpoints" / "best.ckpt", boltcutter=origin)
    facts = info_command(PROJECT, [f"ckpt={file}"])
    assert facts["run"] == "r1"
    assert "abc" in facts["code"]
    assert "code.patch" in facts["code"]
    assert facts["library"] == "commit def"
    assert (facts["attempt"], facts["epoch"], facts["steps"]) == (2, 3, 40)
    shown = capsys.readouterr().out
    assert "abc" in shown
    assert "def" in shown
    copied = save(tmp_path / "elsewhere" / "copy.ckpt", boltcutter=origin)
    moved = info_command(PROJECT, [f"ckpt={copied}", f"runs={tmp_path}"])
    assert moved == {**facts, "checkpoint": copied}
    unknown = describe(copied)  # in a project without the run, the checkpoint itself tells
    assert (unknown["folder"], unknown["command"], unknown["data"]) == (None, "train", "e3")
    assert "code.patch of the run" in unknown["code"]


def test_the_record_of_another_run_says_nothing(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "run", id="r2", library={"commit": "def"})
    file = save(tmp_path / "run" / "copied.ckpt", boltcutter={"run": "r1", "commit": "abc", "dirty": False})
    facts = describe(file)
    assert (facts["code"], facts["library"]) == ("commit abc", None)
    assert describe(save(tmp_path / "other.ckpt"))["run"] is None


@pytest.mark.parametrize("arguments", [[], ["model=mlp"]])
def test_what_is_missing_is_named(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="ckpt="):
        info_command(PROJECT, arguments)
