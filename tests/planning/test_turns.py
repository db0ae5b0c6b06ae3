import json
from pathlib import Path

import lightning as L
import pytest
import torch

from boltcutter.callback.prefetch import Prefetch
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.data.digits import Digits
from boltcutter.model.linear import Linear
from boltcutter.planning import turns
from boltcutter.planning.turns import Turns
from boltcutter.task.classification import Classification


@pytest.mark.filterwarnings("ignore")
def test_the_training_and_the_loop_take_turns_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN", 0.001)
    timer = Turns(tmp_path / "found.json", 0.05)
    task = Classification(Linear((1, 8, 8), 10), optimizer=torch.optim.SGD)
    before = [value.clone() for value in task.state_dict().values()]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ThroughputMonitor(peak_tflops=1.0), Prefetch(2), timer],
    )
    trainer.fit(task, datamodule=Digits(batch_size=32))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["turns"] == len(timer.theirs) > 0
    assert found["ratio"] > 0
    assert found["ms_per_step"] > 0
    assert 0 < found["mfu"] < 1
    assert 0 <= found["overlap"] <= 1
    assert 0 <= found["input_wait"] <= 1
    own = [value for name, value in timer.model.state_dict().items()]
    trained = [value for name, value in task.model.state_dict().items()]
    assert len(own) == len(trained) <= len(before)
    assert not torch.equal(own[0], trained[0])  # the loop has weights of its own
