from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.search.local import TimeLimit, device_variables, run_trials
from boltcutter.search.results import Progress, Result
from boltcutter.search.space import Space
from boltcutter.search.study import Study
from boltcutter.search.trial import Trial

MakeTrial = Callable[..., Trial]


def search(
    folder: Path,
    make_trial: MakeTrial,
    *tasks: str,
    should_stop: Callable[[], bool] = lambda: False,
    parallel: int = 2,
    prunes: bool = True,
) -> list[Result]:
    """Run or continue a search with a trial for each task, and a pruner that compares with those before."""
    folder = folder / "search"
    folder.mkdir(exist_ok=True)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1) if prunes else None
    study = Study(folder, Space({"do": f"grid({', '.join(tasks)})"}), [("loss", "min")], pruner=pruner)
    study.enqueue([{"do": task} for task in tasks])
    progress = Progress([("loss", "min")], len(tasks))
    run_trials(
        study,
        make_trial,
        total=len(tasks),
        parallel=parallel,
        gpus=0,
        should_stop=should_stop,
        progress=progress,
    )
    return study.results()


def children() -> set[str]:
    """IDs of the child processes of this process."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_trials_end_in_each_way(tmp_path: Path, make_trial: MakeTrial, capsys: pytest.CaptureFixture[str]) -> None:
    descriptors, before = len(os.listdir("/proc/self/fd")), children()
    kill = "2 killed-but-for-a-child 1.5"
    results = search(tmp_path, make_trial, "3 2 1", "2 fail", kill, "9 8 7", "kill kill kill kill", parallel=1)
    states = ["complete", "failed", "complete", "pruned", "failed"]
    assert [result.state for result in results] == states
    assert [result.error for result in results] == ["", "optimizer.lr=9: too large", "", "", "killed by SIGKILL"]
    assert [[loss for _, loss in result.curve] for result in results] == [[3, 2, 1], [2], [2, 1.5], [9], []]
    assert results[2].objectives == {"loss": 1.5}
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"]
    assert "trial 1 failed: optimizer.lr=9: too large" in lines[1]
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    os.kill(int((results[2].folder / "child").read_text()), signal.SIGKILL)


def test_an_interrupted_search_continues(tmp_path: Path, make_trial: MakeTrial) -> None:
    before = children()
    tasks = ["9 9 9", "8 8 8", "7 7 7", "6 6 6"]
    counts = iter(range(1000))
    results = search(tmp_path, make_trial, *tasks, should_stop=lambda: next(counts) > 8, prunes=False)
    assert children() == before
    states = [result.state for result in results]
    assert states.count("running") >= 1
    results = search(tmp_path, make_trial, *tasks, prunes=False)
    assert [result.state for result in results] == ["complete"] * 4
    curves = [[loss for _, loss in result.curve] for result in results]
    assert curves == [[loss] * 3 for loss in (9, 8, 7, 6)]
    assert search(tmp_path, make_trial, *tasks, prunes=False) == results


def test_an_error_of_the_search_ends_its_trials(
    tmp_path: Path, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()

    def fails(*args: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Study, "report", fails)
    with pytest.raises(OSError, match="No space left"):
        search(tmp_path, make_trial, "3 2 1", "wait")
    assert children() == before


def test_a_trial_that_ended_while_the_search_was_killed_keeps_its_state(
    tmp_path: Path, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def killed(self: Study, number: int, *args: object, **options: object) -> Result:
        if number == 1:
            raise KilledError
        return tell(self, number, *args, **options)  # type: ignore[arg-type]

    tell = Study.tell
    monkeypatch.setattr(Study, "tell", killed)
    with pytest.raises(KilledError):
        search(tmp_path, make_trial, "3 2", "9 8 7", parallel=1)
    monkeypatch.setattr(Study, "tell", tell)
    results = search(tmp_path, make_trial, "3 2", "9 8 7")
    assert [(result.state, len(result.curve)) for result in results] == [("complete", 2), ("pruned", 1)]


def test_gpus_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(gpus: float, slots: int = 4) -> list[str]:
        return [device_variables(slot, gpus).get("CUDA_VISIBLE_DEVICES", "") for slot in range(slots)]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert of(0) == [""] * 4
    with pytest.raises(ConfigError, match=r"^search\.gpus=0\.5: this machine has no GPU; try search\.gpus=0$"):
        of(0.5)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert of(1) == ["0", "1", "2", "3"]
    assert of(2, 2) == ["0,1", "2,3"]
    assert of(0.5) == ["0", "0", "1", "1"]
    assert of(0.4) == ["0", "0", "1", "1"]  # three would be more than one GPU has
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert of(1) == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]
    assert of(0.5) == ["GPU-a", "GPU-a", "GPU-b", "GPU-b"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert of(1) == ["0", "1", "0", "1"]
    with pytest.raises(ConfigError, match=r"^search\.gpus=3: this machine has 2 GPUs; try search\.gpus=2"):
        of(3)


def test_a_time_limit_is_over_all_continuations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not TimeLimit(tmp_path, None).is_over()
    first = TimeLimit(tmp_path, 60)
    assert not first.is_over()
    now += 50
    assert not first.is_over()
    continued = TimeLimit(tmp_path, 60)  # after a SIGKILL
    now += 9
    assert not continued.is_over()
    now += 1
    assert continued.is_over()
    assert TimeLimit(tmp_path, 60).is_over()
    assert not TimeLimit(tmp_path, 61).is_over()
