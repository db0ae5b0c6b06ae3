import json
import math
from types import SimpleNamespace
from typing import Any

import torch
from planted import BAD
from replay.conftest import Replayed

from boltcutter.checkpoint.load import read_steps
from boltcutter.replay.job import Job
from boltcutter.replay.watch import BEFORE, Watch, as_plain


def test_what_a_step_is_made_of_is_written(replayed: Replayed) -> None:
    found = json.loads((replayed.folder / "result-rank-0.json").read_text())
    assert "NonFiniteGradientError" in found["error"]
    assert found["ended"] == 8
    assert float(found["losses"]["9"][0]) == math.inf
    assert found["bad"] == []
    (culprit,) = [row for row in found["rows"] if not math.isfinite(float(row["loss"]))]
    assert culprit["index"] == BAD
    assert len(found["rows"]) == 16
    assert [layer["layer"] for layer in found["layers"]] == ["net.0", "net.2"]
    assert read_steps(str(replayed.folder / BEFORE)) == 8


def test_numbers_that_json_has_not_are_text() -> None:
    assert as_plain({1: [math.nan, 2.0, (math.inf,)]}) == {"1": ["nan", 2.0, ["inf"]]}


def test_the_step_after_an_altered_one_has_its_whole_batch() -> None:
    class Strategy:
        def training_step(self, batch: Any) -> Any:
            return batch.tolist()

    trainer: Any = SimpleNamespace(global_step=8, global_rank=0, strategy=Strategy(), world_size=1)
    watch = Watch(Job("run", "folder", 99, alter=9, without=[(0, 0, 1)], delays=True))
    watch._seen, seen = 8, []
    module: Any = None
    for number in range(3):
        watch.on_train_batch_start(trainer, module, batch := torch.arange(3) + 10 * number, number)
        seen.append(trainer.strategy.training_step(batch))
        trainer.global_step += 1
        watch.on_train_batch_end(trainer, module, None, batch, number)
    assert seen == [[0, 2], [0, 1, 2], [20, 21, 22]]
