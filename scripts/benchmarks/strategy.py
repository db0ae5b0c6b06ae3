"""Each strategy that runs without GPUs, relative to one process: difference of the final weights, and speed."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.harness import ROOT, TRAIN, BenchmarkError, Process
from boltcutter.project import Project

STARTERS = {  # commands that start the processes, by an override
    "trainer=mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
    "trainer=horovod": ["horovodrun", "-np", "2"],
}
# SGD, since Adam's first steps depend on the sign of the gradient and so amplify rounding errors.
WORK = ["optimizer=sgd", "logger=null", "report=false", "trainer.accelerator=cpu"]
ROWS: dict[str, list[str]] = {
    "one process": [],
    "dp, 2 replicas": ["trainer=dp", "trainer.devices=2"],
    "dp, 3 replicas": ["trainer=dp", "trainer.devices=3"],
    "ddp, 2 ranks": ["trainer=ddp", "trainer.devices=2"],
    "ddp, static graph": ["trainer=ddp", "trainer.devices=2", "+trainer.strategy.static_graph=true"],
    "ddp, bf16 gradients": ["trainer=ddp", "trainer.devices=2", "trainer.strategy.compress=bf16"],
    "ddp, fork": ["trainer=ddp", "trainer.devices=2", "trainer.strategy.start_method=fork"],
    "ddp, spawn": ["trainer=ddp", "trainer.devices=2", "trainer.strategy.start_method=spawn"],
    "mpirun, 2 ranks": ["trainer=mpi"],
    "mpirun, MPI's collectives": ["trainer=mpi", "trainer.strategy.process_group_backend=mpi4py"],
    "horovodrun, 2 ranks": ["trainer=horovod"],
    "horovodrun, fp16 gradients": ["trainer=horovod", "trainer.strategy.compress=fp16"],
    "fsdp2, 2 ranks": ["trainer=fsdp2", "trainer.devices=2"],
    "tensor parallel, 2 ranks": ["trainer=fsdp2", "trainer.devices=2", "trainer.strategy.tensor_parallel_size=2"],
    "fsdp2 × tensor parallel, 4 ranks": [
        "trainer=fsdp2",
        "trainer.devices=4",
        "trainer.strategy.tensor_parallel_size=2",
    ],
    "pipeline, 2 stages": ["trainer=pipeline", "trainer.devices=2"],
    "pipeline, 3 stages": ["trainer=pipeline", "trainer.devices=3"],
    "compiled": ["task.compile=true"],
    "compiled, ddp, 2 ranks": ["task.compile=true", "trainer=ddp", "trainer.devices=2"],
    "compiled, fsdp2, 2 ranks": ["task.compile=true", "trainer=fsdp2", "trainer.devices=2"],
    "XLA": ["task.compile=xla"],
    "XLA, ddp, 2 ranks": ["task.compile=xla", "trainer=ddp", "trainer.devices=2"],
}


class Result(NamedTuple):
    """Result of a run."""

    weights: dict[str, torch.Tensor]
    accuracy: float  # on the test split
    rate: float  # samples per second in the last epoch


def main(project: Project, overrides: list[str]) -> None:
    """Train with each strategy; options: ``epochs=3 rows=one,dp,ddp model=convnet folder=runs/bench``.

    ``rows`` selects rows by the start of their names; all rows are compared with the first.

    Raises:
        BenchmarkError: A run failed, or no row matches.
    """
    chosen = harness.parse_options(overrides, {"epochs": "3", "rows": "", "model": "mlp", "folder": "runs/bench"})
    starts = tuple(chosen["rows"].split(","))
    rows = {name: more for name, more in ROWS.items() if name.startswith(starts) and installed(more)}
    if not rows:
        raise BenchmarkError(f"rows={chosen['rows']}: no row begins with this; choose from: {'; '.join(ROWS)}")
    work = [f"model={chosen['model']}", *WORK]
    compare("strategy", rows, work, int(chosen["epochs"]), Path(chosen["folder"]))


def installed(overrides: list[str]) -> bool:
    """Return whether the dependencies of a row are installed."""
    needs = {
        "trainer=mpi": shutil.which("mpirun"),
        "trainer.strategy.process_group_backend=mpi4py": find_spec("mpi4py"),
        "trainer=horovod": find_spec("horovod"),
        "task.compile=xla": find_spec("torchax"),
    }
    return all(found for override, found in needs.items() if override in overrides)


def compare(name: str, rows: dict[str, list[str]], work: list[str], epochs: int, folder: Path) -> list[dict[str, Any]]:
    """Train each row, and print it relative to the first."""
    print(f"{name}: {harness.machine()}")
    print(f"each: python scripts/train.py {' '.join([*work, f'trainer.max_epochs={epochs}'])} <overrides of the row>")
    width, first, table = max(map(len, rows)), None, list[dict[str, Any]]()
    for row, more in rows.items():
        found = trained([*work, *more, f"trainer.max_epochs={epochs}"])
        first = first or found
        apart = max(float((found.weights[k].double() - first.weights[k].double()).abs().max()) for k in first.weights)
        result = {"accuracy": found.accuracy, "speed": found.rate / first.rate, "apart": apart}
        table.append({"row": row, "overrides": more, **result})
        print(
            "{:{}}  accuracy {accuracy:.4f}  speed {speed:5.2f}  weights apart {apart:.1e}".format(row, width, **result)
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": harness.machine(), "rows": table}, indent=1))
    return table


def trained(overrides: list[str]) -> Result:
    """Train in new processes.

    Raises:
        BenchmarkError: A process failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [str(TRAIN.relative_to(ROOT)), *overrides, f"folder={folder}"]
        for starter in (words for override, words in STARTERS.items() if override in overrides):
            start = f"import os; os.execvp({starter[0]!r}, {[*starter, sys.executable, *command]!r})"
            command = ["-c", start]  # mpirun or horovodrun in place of Python
        Process(command, harness.cores(2), threads=1).wait()
        state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        record = json.loads((folder / "record.json").read_text())
        if "test" not in record:
            raise BenchmarkError(f"{' '.join(overrides)}: the run has no test results")
        with open(folder / "metrics.csv", newline="") as file:
            rates = [row.get("throughput/samples_per_second_epoch") for row in csv.DictReader(file)]
        rate = float([rate for rate in rates if rate][-1] or 0)
    plain = {key: value for key, value in state.items() if key.startswith("model.")}
    return Result(plain, float(record["test"]["test/accuracy"]), rate)
