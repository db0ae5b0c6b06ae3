import gzip
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import Script

from boltcutter_planning.profile import Profile


def test_the_preset_writes_a_trace_and_a_table(script: Script, tmp_path: Path) -> None:
    done = script("train", "debug=profile", "model=mlp", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert f"profile: {tmp_path}/run/profile/trace-rank-0.json.gz" in done.stdout
    with gzip.open(tmp_path / "run" / "profile" / "trace-rank-0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    assert names.count("aten::addmm") == 5 * 3  # of five steps, three layers each
    assert "aten::addmm" in (tmp_path / "run" / "profile" / "table-rank-0.txt").read_text()
    files = {file.name for file in (tmp_path / "run" / "profile").iterdir()}
    assert files == {"trace-rank-0.json.gz", "table-rank-0.txt"}


def test_training_that_ends_before_or_during_profiling(script: Script, tmp_path: Path) -> None:
    done = script("train", "debug=profile", "model=mlp", "trainer.max_steps=3", f"folder={tmp_path}/a")
    assert "profile: nothing was profiled" in done.stdout
    done = script("train", "debug=profile", "model=mlp", "trainer.max_steps=7", f"folder={tmp_path}/b")
    assert "profile: " in done.stdout
    assert (tmp_path / "b" / "profile" / "trace-rank-0.json.gz").is_file()


@pytest.mark.parametrize(("wait", "active"), [(0, 1), (0, 5), (1, 2), (3, 1)])
def test_exactly_the_active_batches_are_profiled(tmp_path: Path, wait: int, active: int) -> None:
    callback, trainer, module = Profile(tmp_path, wait=wait, active=active), mock.Mock(global_rank=0), mock.Mock()
    trace = tmp_path / "trace-rank-0.json.gz"
    callback.on_train_start(trainer, module)
    for count in range(1, 8):
        torch.full((2,), count).cumsum(0)
        callback.on_train_batch_end(trainer, module, None, None, count)
        assert trace.is_file() == (count >= wait + active)
    callback.on_train_end(trainer, module)
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::cumsum") == active


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callback.profile.active=0 .*; try 5"):
        Profile(Path(), active=0)
