import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, Script

from boltcutter.run import compare


def folder_with(where: Path, name: str, **record: Any) -> Path:
    (where / name).mkdir()
    (where / name / "record.json").write_text(json.dumps(record))
    return where / name


def test_equal_metrics_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"val/loss": 0.1}
    compare.report_reproduction(
        folder_with(tmp_path, "a", metrics=metrics), folder_with(tmp_path, "b", metrics=metrics)
    )
    assert capsys.readouterr().out == f"reproduced: all 1 metrics equal those of {tmp_path / 'a'}\n"


def test_a_resumed_original_is_named_as_a_possible_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, attempts=[{"resumed_from": "last.ckpt"}])
    compare.report_reproduction(before, folder_with(tmp_path, "b", metrics={"val/loss": 0.2}))
    assert "note: the original was resumed" in capsys.readouterr().out


def test_rounding_of_a_gpu_is_named_as_a_possible_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = [{"device": "cpu", "deterministic": True}, {"device": "cuda", "deterministic": False}]
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, attempts=attempts)
    after = folder_with(tmp_path, "b", metrics={"val/loss": 0.2}, attempts=attempts[:1])
    compare.report_reproduction(before, after)
    assert "note: rounding varies on cuda without trainer.deterministic=true" in capsys.readouterr().out
    compare.report_reproduction(after, folder_with(tmp_path, "c", metrics={}, attempts=attempts[:1]))
    assert "rounding" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"metrics": {"val/loss": 0.1 + 1e-17}}, "reproduced"),
        ({"metrics": {"val/loss": 0.1, "recompiles": 1.0}}, "reproduced: all 1 metrics"),
        ({"metrics": {"val/loss": 0.1 + 1e-15}}, "not reproduced: val/loss is 0.100000000000001, was 0.1"),
        ({"metrics": {}}, "not reproduced: val/loss is None, was 0.1"),
        ({"metrics": {"val/loss": 0.1}, "data": "b"}, "warning: data differ: fingerprint b, was a"),
    ],
)
def test_differences_are_reported_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], here: dict[str, object], message: str
) -> None:
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, data="a")
    compare.report_reproduction(before, folder_with(tmp_path, "b", **({"data": "a"} | here)))
    assert message in capsys.readouterr().out


def test_records_of_somebody_else_are_reported_in_printable_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    escapes = "\x1b]0;title\x07\x9b31m"
    odd = [{"deterministic": False}, {"deterministic": False, "device": []}, {"deterministic": False, "device": "cuda"}]
    first = folder_with(tmp_path, "first", attempts=odd, metrics={escapes: 1}, data=escapes)
    second = folder_with(tmp_path, "second", attempts=None, metrics=None, test=None)
    compare.report_reproduction(first, second)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)


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
    assert lines[0].startswith("step      step 1 (epoch 0): samples, loss ")
    assert lines[1] == "setting   seed=0 → 1"
    assert lines[2].startswith("hardware  device cpu → cuda")
    assert lines[3].startswith("data      ")  # another split
    assert any(line.startswith("metric    test/loss is ") for line in lines)
    assert "tensors differ, by at most " in lines[-2]
    assert lines[-1] == "rounding  varies on cuda without trainer.deterministic=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "error: run is not set; use boltcutter compare <run> <run>"),
        (["run=x", "with=y", "seed=1"], "error: seed=1: no such argument; use boltcutter compare <run> <run>"),
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
        ({"b": torch.tensor([1.0, float("nan")])}, True, "1 tensors, 2 parameters, bitwise identical; 1 of them are"),
        ({"a": torch.tensor([1, 2])}, False, "1 of 1 tensors differ"),
    ],
)
def test_weights_are_compared_bitwise(second: dict[str, torch.Tensor], equal: bool, message: str) -> None:
    line, same = compare.weight_difference({"a": torch.tensor([1.0, float("nan")])}, second)
    assert same is equal
    assert line.startswith(message)


def test_settings_are_compared_individually() -> None:
    first = {"folder": "a", "seed": 0, "model": {"width": 3, "depth": 1}}
    second = {"folder": "b", "seed": 0, "model": {"width": 4}, "name": "x"}
    assert list(compare.setting_differences(first, second)) == [
        "model.width=3 → 4",
        "model.depth=1 → None",
        "name=None → x",
    ]


def test_a_run_without_a_ledger_is_said_to_be_not_compared(tmp_path: Path) -> None:
    lines, is_different = compare.step_differences(tmp_path / "a", tmp_path / "b")
    assert "steps.ledger" in lines[0]
    assert not is_different


def test_settings_without_effect_on_a_step_are_last() -> None:
    settings = ["name=a → b", "data.num_workers=0 → 2", "optimizer.lr=0.1 → 0.2"]
    found = compare.Comparison(settings, None, [], "", identical=True, records=("package   numpy 1 → 2",))
    lines = str(found).splitlines()
    assert [line.split("=")[0].split()[-1] for line in lines[:1]] == ["optimizer.lr"]
    assert lines[1] == "package   numpy 1 → 2"
    assert all("without effect" in line for line in lines[2:4])


def test_records_of_somebody_else_are_compared_in_printable_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    escapes = "\x1b]0;title\x07\x9b31m"
    found = compare.Comparison([escapes], escapes, [escapes], escapes, identical=True, nondeterministic=(escapes,))
    monkeypatch.setattr(compare, "compare", lambda *_: found)
    compare.compare_command(None, [])  # type: ignore[arg-type]  # replaced above
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    assert all(line.isprintable() for line in lines)
