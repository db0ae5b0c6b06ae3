import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from boltcutter.config.errors import ConfigError
from boltcutter.planning.batch_size import _messages, batch_unit, find_batch_size_command, first_size, search, trial
from boltcutter.project import Project


@pytest.mark.parametrize(
    ("largest", "start", "unit", "found"),
    [
        (1000, 64, 1, 938),
        (1000, 64, 8, 944),
        (70, 64, 2, 70),
        (5, 64, 1, 5),
        (64, 64, 8, 64),
        (7, 64, 8, None),
        (1437, 10**9, 1, 1340),
        (24, 10**6, 8, 24),
    ],
)
def test_search_finds_the_largest_size_within_ten_percent(
    largest: int, start: int, unit: int, found: int | None
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert search(start, unit, fits) == found
    assert all(size % unit == 0 for size in tried)
    assert len(tried) == len(set(tried)) <= 15
    assert found is None or largest / 1.1 <= found <= largest


def test_too_few_samples_end_the_search_upwards() -> None:
    assert search(64, 1, lambda size: True if size <= 200 else None) == 197


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        ({"devices": "auto", "accelerator": "auto"}, 8),
        ({"devices": -1, "accelerator": "gpu"}, 8),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({"devices": [0, 3]}, 2),
        ({"devices": "1,2,3"}, 3),
        ({"devices": "4"}, 4),
        ({}, 8),
        ({"devices": 3, "num_nodes": 2}, 6),
    ],
)
def test_sizes_are_multiples_of_the_selected_devices(
    monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert batch_unit(trainer) == count


@pytest.mark.parametrize("error", ["CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"])
def test_a_library_without_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str) -> None:
    code = f"import sys; print('error: {error}', file=sys.stderr); sys.exit(1)"
    assert trial([sys.executable, "-c", code], [], 64.0, tmp_path, 8) is False


def find_batch_size(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "boltcutter", "find-batch-size", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_search_under_a_memory_limit(tmp_path: Path) -> None:
    # 1.5 GiB of images in one batch against a process that may take less; half of it fits.
    overrides = [
        "data=synthetic",
        "data.num_samples=6000",
        "data.shape=[1,256,256]",
        "data.batch_size=4096",
        "model=linear",
    ]
    done = find_batch_size(*overrides, "limit_gib=2.6")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["4,096", "does", "not", "fit"]
    assert any(line.endswith(" fits") for line in lines)
    assert lines[-1].startswith("data.batch_size=")


@pytest.mark.parametrize("size", [0, -1, None, "abc", float("nan"), 1e9, [1, 2], True])
def test_the_first_size_is_a_number_of_samples(size: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a number of samples to start with; try data\.batch_size=64$"):
        first_size({"data": {"batch_size": size}, "trainer": {"accelerator": "cpu", "devices": 1}})


def test_a_limit_is_a_number() -> None:
    with pytest.raises(ConfigError, match=r"^limit_gib=x is not a number of GiB; try 4$"):
        find_batch_size_command(Project.find(ROOT), ["limit_gib=x"])


@pytest.mark.slow
def test_errors_are_one_line() -> None:
    done = find_batch_size("trainer.max_epoch=3")
    assert done.returncode == 2
    assert "did you mean max_epochs" in done.stderr
    assert done.stderr.count("\n") == 1


def test_notes_before_an_error_are_no_part_of_it() -> None:
    assert _messages("note: a is not used\nerror: b: wrong; try c\n") == ["b: wrong; try c"]
    assert _messages("MemoryError\n") == ["MemoryError"]
