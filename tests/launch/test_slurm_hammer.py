"""Signals at random moments on a SLURM cluster: SIGNALS=500 pytest -m slow tests/launch/test_slurm_hammer.py -s."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from conftest import Script
from slurm_cluster import Cluster

SIGNALS = int(os.environ.get("SIGNALS", "100"))
PARALLEL = 2  # concurrent runs, so that one trains while the other is in the queue
SECONDS = 300.0  # until a run must have ended or started again
OVERRIDES = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.02", "logger=null", "report=false", "trainer=ddp"]
OVERRIDES += ["trainer.accelerator=cpu", "trainer.max_epochs=150"]


class Run:
    """A run on two nodes that receives signals repeatedly until it has completed."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        overrides = ["trainer.num_nodes=2", "trainer.devices=1", "launch.max_restarts=1000"]
        self.folder, self.job = cluster.submit(f"hammer-{number}", *OVERRIDES, *overrides)
        self.restarts, self.since, self.due = -1, time.monotonic(), 0.0

    def poll(self, *, enough: bool) -> tuple[str, bool]:
        """Return the state of the job, and whether a signal was sent; with ``enough`` none is sent."""
        facts = self.cluster.job(self.job)
        state, restarts = facts["JobState"], int(facts["Restarts"])
        log = self.folder / "logs" / "slurm.log"
        text = log.read_text() if log.exists() else ""
        assert time.monotonic() - self.since < SECONDS, f"hangs:\n{text}"
        if enough or state != "RUNNING" or restarts == self.restarts or text.count(" starts on ") <= restarts:
            return state, False
        if not self.due:  # its processes were started, so signals are sent at any point of the run
            self.due = time.monotonic() + random.uniform(0, 20)
        if time.monotonic() < self.due:
            return state, False
        self.cluster.call("scancel", f"--signal={random.choice(['USR2', 'TERM'])}", self.job)
        self.restarts, self.since, self.due = restarts, time.monotonic(), 0.0
        return state, True


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(SIGNALS * 60)
def test_no_signal_is_lost_and_no_weight_differs(cluster: Cluster, script: Script, tmp_path: Path) -> None:
    uninterrupted = script("train", *OVERRIDES, "trainer.devices=2", f"folder={tmp_path}/run", timeout=600)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    expected = weights(tmp_path / "run")
    signals = begun = completed = 0
    live: list[Run] = []
    while signals < SIGNALS or live:
        while signals < SIGNALS and len(live) < PARALLEL:
            live.append(Run(cluster, begun))
            begun += 1
        for run in list(live):
            state, sent = run.poll(enough=signals >= SIGNALS)
            signals += sent
            if state not in ("RUNNING", "PENDING", "COMPLETING"):
                assert state == "COMPLETED", (run.folder / "logs" / "slurm.log").read_text()
                ours = weights(run.folder)
                assert all(torch.equal(ours[key], expected[key]) for key in expected)
                attempts = json.loads((run.folder / "record.json").read_text())["attempts"]
                completed += 1
                print(
                    f"{signals} signals, {completed} runs completed, this one in {len(attempts)} attempts", flush=True
                )
                live.remove(run)
        time.sleep(0.2)
