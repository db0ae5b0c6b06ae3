import csv
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pandas as pd
import pytest
import torch
from conftest import QUICK, Script, environment
from forkserver import Forked, ForkServer
from third_party.gallery import overrides

from boltcutter.config.errors import ConfigError
from boltcutter.training import train

PLAIN = [*QUICK, "model=mlp"]  # no dropout or BatchNorm, which depend on the batch of each rank
TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())  # type: ignore[no-any-return]


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoints" / f"{which}.ckpt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if "metrics" not in name and "means" not in name}


def max_difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.fixture(scope="module")
def single(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    done = script("train", *PLAIN, f"folder={folder}", "seed=5")
    assert done.returncode == 0, done.stderr
    return folder


def test_files_of_a_run(trained: Path) -> None:
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert files >= {
        "config.yaml",
        "record.json",
        "metrics.csv",
        "report.html",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "evaluation/test/metrics.json",
        "evaluation/test/confusion.svg",
        "logs/rank-0.log",
    }
    known = record(trained)
    assert known["attempts"][0]["reason"] == "completed"
    assert len(known["data"]) == 16
    assert known["test"]["test/accuracy"] > 0.9
    assert known["wandb"]["id"] == known["id"]
    assert list((trained / "wandb").glob(f"offline-run-*-{known['id']}"))
    assert "epoch 6/6" in (trained / "logs" / "rank-0.log").read_text()


def test_metrics_csv_has_one_row_per_step(trained: Path) -> None:
    with open(trained / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert sum(bool(row["val/accuracy"]) for row in rows) == 6
    assert {"train/loss", "val/loss", "test/accuracy", "lr-AdamW", "throughput/samples_per_second"} <= rows[0].keys()


def test_the_same_seed_is_bitwise_reproducible(script: Script, single: Path, tmp_path: Path) -> None:
    done = script("train", f"reproduce={single}", f"folder={tmp_path}/again")
    assert done.returncode == 0, done.stderr
    assert f"metrics equal those of {single}" in done.stdout
    assert max_difference(single, tmp_path / "again") == 0.0


def test_a_failed_reproduction_is_reported(script: Script, single: Path, tmp_path: Path) -> None:
    done = script("train", f"reproduce={single}", f"folder={tmp_path}/again", "seed=6")
    assert done.returncode == 0, done.stderr
    assert "not reproduced: val/loss is" in done.stdout
    assert "data differ" in done.stdout  # the split depends on the seed


def test_two_processes_share_one_run_and_the_same_weights(script: Script, single: Path, tmp_path: Path) -> None:
    done = script("train", *PLAIN, *TWO, f"runs={tmp_path}", "seed=5")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("*/*")
    assert max_difference(single, folder) < 1e-6
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert record(folder)["attempts"][0]["devices"] == 2
    assert record(folder)["test"] == pytest.approx(record(single)["test"], abs=1e-6)


@pytest.mark.parametrize("starts", ["ranks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_create_one_run_and_one_wandb_run(
    torchrun: Script, script: Script, single: Path, tmp_path: Path, starts: str
) -> None:
    overrides = [override for override in PLAIN if not override.startswith("logger")]
    overrides += [*TWO[1:], f"runs={tmp_path}", "seed=5"]
    done = torchrun("train", *overrides) if starts == "torchrun" else script("train", *overrides, ranks=2)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("*/*")
    assert max_difference(single, folder) < 1e-6
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert done.stdout.count("test/accuracy") == 1  # only rank zero prints


def test_more_processes_than_devices_are_refused(script: Script, tmp_path: Path) -> None:
    done = script("train", *PLAIN, f"runs={tmp_path}/runs", ranks=2)
    assert done.returncode != 0
    message = (
        "trainer.devices=1, trainer.num_nodes=1: 2 processes were started; set trainer.devices=2 trainer.num_nodes=1"
    )
    assert done.stderr.count(f"error: {message}") == 1
    assert not (tmp_path / "runs").exists()


def test_more_nodes_than_torchrun_started_are_refused(script: Script, tmp_path: Path) -> None:
    done = script("train", *PLAIN, "trainer.num_nodes=2", f"runs={tmp_path}/runs", ranks=1)
    assert done.returncode == 2
    assert done.stderr.startswith("error: trainer.devices=1, trainer.num_nodes=2: 1 processes were started; set ")
    assert done.stderr.count("\n") == 1


def test_manually_launched_ranks_share_one_run(script: Script, single: Path, tmp_path: Path) -> None:
    done = script("train", *PLAIN, *TWO[1:], f"runs={tmp_path}", "seed=5", ranks=2)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("*/*")
    assert max_difference(single, folder) < 1e-6


def test_a_killed_run_resumes_bitwise_identical(forks: ForkServer, script: Script, tmp_path: Path) -> None:
    overrides = ["logger=null", "report=false", "trainer.max_epochs=6"]  # with dropout and BatchNorm
    uninterrupted = script("train", *overrides, f"folder={tmp_path}/uninterrupted")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    argv = ["scripts/train.py", *overrides, f"folder={tmp_path}/killed"]
    with open(os.devnull, "wb") as nothing, forks.start(argv, environment(), nothing.fileno(), 2) as process:
        wait_for(tmp_path / "killed" / "checkpoints" / "last.ckpt", process)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert process.returncode == -signal.SIGKILL
    resumed = script("train", f"resume={tmp_path}/killed")
    assert resumed.returncode == 0, resumed.stderr
    assert max_difference(tmp_path / "uninterrupted", tmp_path / "killed") == 0.0
    reasons = [attempt["reason"] for attempt in record(tmp_path / "killed")["attempts"]]
    assert reasons == ["killed", "completed"]
    assert record(tmp_path / "killed")["test"] == record(tmp_path / "uninterrupted")["test"]


def wait_for(path: Path, process: Forked) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_folder_that_holds_a_run_is_not_overwritten(script: Script, single: Path) -> None:
    before = record(single)
    done = script("train", *PLAIN, f"folder={single}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: folder={single} holds a run; use resume={single} ")
    assert record(single) == before


def test_a_failure_in_training_ends_with_status_1_and_its_reason(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, f"folder={tmp_path}/run", "model.input_shape=[3,8,8]")
    assert done.returncode == 1
    assert done.stderr.startswith("error: model: ")
    assert "(convnet.py:" in done.stderr
    assert "batch: [(64, 1, 8, 8) uint8, (64,) int64]" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert record(tmp_path / "run")["attempts"][0]["reason"].startswith("FirstBatchError: model: ")


def test_a_data_error_is_one_line_and_creates_no_folder(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, f"runs={tmp_path}/runs", "data=tabular", "data.path=none.csv", "data.target=y")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["callback=[default,ema,early_stopping]", "model=linear"],
        ["experiment=diabetes"],
        ["optimizer=sgd", "scheduler=onecycle", "optimizer.lr=0.05", "trainer.accumulate_grad_batches=2"],
        ["scheduler=null", "task.l1=1e-4", "task.l2=1e-4", "task.label_smoothing=0.1", "trainer.precision=bf16-mixed"],
        ["logger=tensorboard", "callback=null", "model=resnet", "data.num_workers=2"],
        ["data=synthetic", "model=mlp"],
    ],
    ids=" ".join,
)
def test_combinations_of_options_train(script: Script, tmp_path: Path, overrides: list[str]) -> None:
    done = script("train", *QUICK, *overrides, f"folder={tmp_path}/run", "trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "run")["test"]
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("override", "output"),
    [("trainer.fast_dev_run=true", "epoch 1/1"), ("trainer.profiler=simple", "run_training_epoch")],
)
def test_lightning_debug_options(script: Script, override: str, output: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = script("train", f"folder={folder}", "model=linear", "trainer.max_epochs=1", "report=false", override)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    saved = (folder / "checkpoints" / "last.ckpt").is_file()
    assert (f"resume={folder}" in done.stdout) == saved == (override == "trainer.profiler=simple")
    assert record(folder)["test"].keys() == {"test/loss", "test/accuracy", "test/f1"}


def test_a_run_without_checkpoints_warns(script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["callback=early_stopping", "model=linear", f"folder={folder}", *QUICK]
    done = script("train", *overrides)
    assert done.returncode == 0, done.stderr
    assert "warning: callback=early_stopping: no callback saves checkpoints" in done.stderr
    assert "callback=[default,early_stopping]" in done.stderr
    assert f"resume={folder}" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", [["model=mlp"], overrides("own_loaders")], ids=["native", "foreign"])
def test_presets_for_debugging(task: list[str], script: Script, tmp_path: Path) -> None:
    limits = {"overfit": ["trainer.max_epochs=40"], "limit": [], "fast": [], "anomaly": ["trainer.max_epochs=1"]}
    for preset, less in limits.items():
        done = script("train", f"debug={preset}", *task, *less, f"folder={tmp_path}/{preset}", env=TESTS)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / preset / "wandb").exists()
    assert not list((tmp_path / "overfit" / "checkpoints").glob("*.ckpt"))
    losses = pd.read_csv(tmp_path / "overfit" / "metrics.csv").get("train/loss_epoch", pd.Series([1.0, 0.0])).dropna()
    assert losses.iloc[-1] < losses.iloc[0] / 2  # foreign modules log other metrics
    assert (tmp_path / "limit" / "report.html").is_file()
    assert not (tmp_path / "fast" / "report.html").exists()
    assert (tmp_path / "fast" / "checkpoints" / "last.ckpt").is_file()


MODULE = """
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self, kind: str = ""):
        super().__init__()
        self.kind, self.net = kind, torch.nn.Linear(2, 1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), 4)

    val_dataloader = train_dataloader

    def test_dataloader(self):
        return {"none": None, "empty": []}.get(self.kind, self.train_dataloader())

    def loss(self, batch):
        return self.net(batch[0]).pow(2).mean()

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val/loss", self.loss(batch))
        if self.kind == "gradient":
            self.loss(batch).backward()

    def test_step(self, batch, index):
        if self.kind == "fails":
            raise KeyError("no such column")
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


@pytest.fixture
def module(tmp_path: Path) -> list[str]:
    """Overrides that train a module with its own loaders."""
    (tmp_path / "loading_module.py").write_text(MODULE)
    (tmp_path / "task.yaml").write_text('# Fails or not.\n_target_: loading_module.Module\nkind: ""\n')
    return [*QUICK, f"task={tmp_path}/task.yaml", "data=null", "test=true", "trainer.max_epochs=1"]


@pytest.mark.parametrize("kind", ["none", "empty"])
def test_a_function_that_returns_no_loader_means_that_nothing_is_tested(
    script: Script, module: list[str], tmp_path: Path, kind: str
) -> None:
    env = {"PYTHONPATH": str(tmp_path)}
    done = script("train", *module, f"task.kind={kind}", f"folder={tmp_path}/run", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "test=true: Module.test_dataloader returns no loader" in done.stdout
    known = record(tmp_path / "run")
    assert (known["attempts"][-1]["reason"], known["test"], bool(known["best"])) == ("completed", {}, True)
    done = script("evaluate", f"run={tmp_path}/run", env=env)
    assert done.returncode == 2
    assert "split=test: Module.test_dataloader returns no loader" in done.stderr


def test_a_test_that_fails_leaves_a_completed_run(script: Script, module: list[str], tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(tmp_path)}
    done = script("train", *module, "task.kind=fails", f"folder={tmp_path}/run", env=env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no such column" in done.stderr.splitlines()[-1]
    known = record(tmp_path / "run")
    assert known["attempts"][-1]["reason"].startswith("completed, but the test failed")
    assert known["best"]
    done = script("train", f"resume={tmp_path}/run", "trainer.max_epochs=2", "test=false", env=env)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "run")["attempts"][-1]["reason"] == "completed"


def test_a_module_that_needs_gradients_in_validation_is_one_line(
    script: Script, module: list[str], tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(tmp_path)}
    done = script("train", *module, "task.kind=gradient", f"folder={tmp_path}/run", env=env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "+trainer.inference_mode=false" in done.stderr


class Downloads:
    def fetch(self, *_: Any) -> None:
        raise URLError("Name or service not known")


def test_a_download_that_fails_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = Downloads()
    monkeypatch.setattr(train, "run_hooks_early", data.fetch)
    components: Any = SimpleNamespace(trainer=SimpleNamespace(local_rank=0), task=None, data=data)
    with pytest.raises(
        ConfigError, match=r"^data: <urlopen error .*> \(URLError at .*test_train.py:[0-9]+\); correct it"
    ):
        train.load_data(components)
