import json
from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script

from boltcutter_runs import equality


def test_runs_with_the_same_seed_are_identical_and_with_another_seed_not(script: Script, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        done = script("train", *QUICK, "model=mlp", f"seed={seed}", f"folder={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
    same = script("compare", f"run={tmp_path}/a", f"with={tmp_path}/b")
    assert same.returncode == 0, same.stderr
    first, second = same.stdout.splitlines()
    assert first.split() == ["metric", "identical"]
    assert second.endswith("bitwise identical")
    record = json.loads((tmp_path / "c" / "record.json").read_text())
    assert record["attempts"][0]["deterministic"]
    record["attempts"][0] |= {"device": "cuda", "deterministic": False}
    (tmp_path / "c" / "record.json").write_text(json.dumps(record))
    other = script("compare", f"run={tmp_path}/a", f"with={tmp_path}/c", "ckpt=best")
    assert other.returncode == 1
    lines = other.stdout.splitlines()
    assert lines[0] == "setting   seed=0 → 1"
    assert lines[1].startswith("data      ")  # another split
    assert any(line.startswith("metric    test/accuracy is ") for line in lines)
    assert "tensors differ, by at most " in lines[-2]
    assert lines[-1] == "rounding  varies on cuda without trainer.deterministic=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "error: run, with: expected run=<folder> with=<folder>"),
        (["run=x", "with=y", "seed=1"], "error: seed=1: expected run=<folder> with=<folder>"),
        (["run=nowhere", "with=y"], "error: run=nowhere: no run there"),
    ],
)
def test_errors_are_one_line(script: Script, overrides: list[str], message: str) -> None:
    done = script("compare", *overrides)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(message)


@pytest.mark.parametrize(
    ("second", "equal", "message"),
    [
        ({"a": torch.tensor([1.0, float("nan")])}, True, "1 tensors, 2 parameters, bitwise identical"),
        ({"a": torch.tensor([1.0 + 1e-6, float("nan")])}, False, "1 of 1 tensors differ"),
        ({"a": torch.tensor([1.0])}, False, "different models: 1 tensors have no counterpart (a"),
        ({"b": torch.tensor([1.0, 2.0])}, False, "different models: 2 tensors have no counterpart (a, b"),
        ({"a": torch.tensor([1, 2])}, False, "1 of 1 tensors differ"),
    ],
)
def test_weights_are_compared_bitwise(second: dict[str, torch.Tensor], equal: bool, message: str) -> None:
    line, same = equality.weight_difference({"a": torch.tensor([1.0, float("nan")])}, second)
    assert same is equal
    assert line.startswith(message)


def test_settings_are_compared_individually() -> None:
    first = {"folder": "a", "seed": 0, "model": {"width": 3, "depth": 1}}
    second = {"folder": "b", "seed": 0, "model": {"width": 4}, "name": "x"}
    assert list(equality.setting_differences(first, second)) == [
        "model.width=3 → 4",
        "model.depth=1 → None",
        "name=None → x",
    ]


def test_records_of_somebody_else_are_compared_in_printable_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    escapes = "\x1b]0;title\x07\x9b31m"
    found = equality.Comparison([escapes], escapes, [escapes], escapes, identical=True, nondeterministic=(escapes,))
    monkeypatch.setattr(equality, "compare", lambda *_: found)
    equality.main(None, [])  # type: ignore[arg-type]  # replaced above
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    assert all(line.isprintable() for line in lines)
