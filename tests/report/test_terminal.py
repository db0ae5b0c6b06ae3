import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel

from boltcutter.report import terminal as summary


def folder_with(tmp_path: Path, name: str, **record: object) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    # The clock was set back during the run.
    attempt = {"start": "2026-01-01T00:00:00+00:00", "end": "2025-12-31T01:02:03+00:00", "seconds": 3723.4}
    (folder / "record.json").write_text(json.dumps({"attempts": [attempt]} | record))
    return folder


def test_the_end_shows_metrics_time_and_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"best": "checkpoints/best.ckpt", "best_by": {"monitor": "val/loss", "mode": "min", "score": 0.25}}
    folder = folder_with(tmp_path, "run", test={"test/accuracy": 0.98765}, best_after=24, **best)
    summary.print_end(folder)
    shown = capsys.readouterr().out
    for part in (
        "test/accuracy  0.9877",
        "1:02:03",
        "best.ckpt, after 24 steps, val/loss 0.2500",
        f"boltcutter evaluate run={folder}",
        f"resume={folder}",
    ):
        assert part in shown
    assert "report" not in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize(
    ("predicts", "steps", "limit"), [("input=<files>", -1, "epochs"), ("input=<text or file>", 9, "steps")]
)
def test_next_commands_match_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], predicts: str, steps: int, limit: str
) -> None:
    folder = folder_with(tmp_path, "run", config={"trainer": {"max_steps": steps}}, best="checkpoints/last.ckpt")
    summary.print_end(folder, predicts=predicts)
    shown = capsys.readouterr().out
    assert f"boltcutter predict run={folder} {predicts}" in shown
    assert f"trainer.max_{limit}=<more>" in shown


def test_unavailable_commands_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.print_end(folder_with(tmp_path, "run", best="checkpoints/last.ckpt"), evaluates=False, predicts=None)
    shown = capsys.readouterr().out
    assert "resume=" in shown
    assert "boltcutter evaluate" not in shown
    assert "boltcutter predict" not in shown


def test_the_folder_of_a_trace_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, "run", best="checkpoints/last.ckpt")
    (folder / "fit-step.1.pt.trace.json").touch()  # of trainer.profiler=pytorch
    summary.print_end(folder)
    assert f"{folder}\n" in capsys.readouterr().out
    (folder / "profile").mkdir()
    summary.print_end(folder)
    assert f"{folder / 'profile'}\n" in capsys.readouterr().out


def test_brackets_are_printed_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.print_end(folder_with(tmp_path, "[bold]run [red]", test={"test/[blue]": 0.5}, best="best.ckpt"))
    shown = capsys.readouterr().out
    assert shown.count("[bold]run [red]") == 4
    assert "test/[blue]" in shown


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.print_end(folder_with(tmp_path, "run", metrics={"val/loss": 12345.678}))
    shown = capsys.readouterr().out
    assert "best.ckpt" not in shown
    assert "12345.7" in shown


def test_evaluation_shows_overall_and_per_class_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "classes.csv").write_text("class,precision,recall,f1,samples\ncat,0.5,1.0,0.66667,3\n")
    summary.print_evaluation(tmp_path, {"test/accuracy": 0.5})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["test/accuracy", "0.5000"]
    assert last.split() == ["cat", "0.5000", "1.0000", "0.6667", "3"]


def test_names_of_metrics_and_classes_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run of somebody else, they are in its configuration."""
    name = "\x1b]0;title\x07\x9b31m"
    (tmp_path / "classes.csv").write_text(f"class,recall,samples\n{name},0.5,7\n")
    summary.print_evaluation(tmp_path, {name: 0.5})
    shown = capsys.readouterr().out
    assert shown.count(r"\x1b]0;title\x07\x9b31m") == 2
    assert all(line.isprintable() for line in shown.splitlines())


class CUDAAccelerator(CPUAccelerator):
    """As on a GPU, where only the name of the class counts."""


@pytest.mark.parametrize(
    ("accelerator", "precision", "capability", "shown"),
    [
        (CUDAAccelerator, "32-true", (8, 0), True),
        (CUDAAccelerator, "32-true", (7, 5), False),
        (CUDAAccelerator, "bf16-mixed", (8, 0), False),
        (CPUAccelerator, "32-true", (8, 0), False),
    ],
)
def test_the_start_names_tf32_where_it_helps(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    accelerator: type[CPUAccelerator],
    precision: Any,
    capability: tuple[int, int],
    shown: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    trainer = L.Trainer(accelerator=accelerator(), devices=1, precision=precision, logger=False)
    trainer.datamodule = None  # type: ignore[attr-defined]
    summary.print_start(tmp_path, trainer, BoringModel())
    assert ("matmul_precision=high is faster" in capsys.readouterr().out) == shown
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    summary.print_start(tmp_path, trainer, BoringModel())
    assert "matmul_precision" not in capsys.readouterr().out
