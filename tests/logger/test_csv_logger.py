import io
import math
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from boltcutter.logger.csv_logger import CSVLogger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.csv"


def logger(path: Path) -> CSVLogger:
    """A logger that writes only on ``finalize``."""
    return CSVLogger(path, seconds_between_writes=3600)


def log(path: Path, *rows: tuple[int, dict[str, float]], into: CSVLogger | None = None) -> CSVLogger:
    into = into or logger(path)
    for step, metrics in rows:
        into.log_metrics(metrics, step)
        into.save()
    into.finalize("success")
    return into


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_metrics_of_one_step_share_a_row(path: Path) -> None:
    log(path, (0, {"loss": 2.0, "epoch": 0}), (0, {"lr": 0.1}), (5, {"loss": 1.0, "epoch": 1}))
    assert lines(path) == ["step,epoch,loss,lr", "0,0,2.0,0.1", "5,1,1.0,"]


def test_a_new_column_is_added_to_all_rows(path: Path) -> None:
    made = log(path, (0, {"loss": 2.0}), (1, {"loss": 1.0}))
    log(path, (2, {"loss": 0.5}), (2, {"val/loss": 0.7}), into=made)
    assert lines(path) == ["step,epoch,loss,val/loss", "0,,2.0,", "1,,1.0,", "2,,0.5,0.7"]


def test_names_of_metrics_are_no_formula(path: Path) -> None:
    made = log(path, (0, {"=1+1": 2.0, "-x": 1.0}))
    log(path, (1, {"=1+1": 3.0}), into=made)
    log(path, (2, {"=1+1": 4.0, "\uff1dy": 5.0}))  # of a run that is resumed
    assert lines(path) == ["step,epoch,'=1+1,'-x,'\uff1dy", "0,,2.0,1.0,", "1,,3.0,,", "2,,4.0,,5.0"]


@pytest.mark.parametrize(
    "step", ["9" * 5000, "\N{SUPERSCRIPT TWO}", "\N{FULLWIDTH DIGIT TWO}", "x", "-1", "1" * 10**6], ids=range(6)
)
def test_rows_without_a_step_are_left_out(path: Path, step: str) -> None:
    path.parent.mkdir()
    path.write_text(f"step,epoch,loss\n0,0,1.0\n{step},0,2.0\n")
    log(path, (1, {"loss": 3.0}))
    assert lines(path) == ["step,epoch,loss", "0,0,1.0", "1,,3.0"]


def test_the_last_row_can_change_after_it_was_written(path: Path) -> None:
    made = log(path, (0, {"loss": 2.0, "lr": 0.1}), (1, {"loss": 1.0}))
    log(path, (1, {"lr": 0.05}), into=made)
    log(path, (2, {"loss": 0.5}), into=made)
    log(path, (2, {"loss": 0.123456789}), into=made)
    log(path, (2, {"loss": 0.25}), (3, {"loss": 0.1, "lr": 0.01}), into=made)
    log(path, (3, {"loss": 0.0}), into=made)
    log(path, (3, {"lr": 1.0}), into=made)
    assert lines(path) == ["step,epoch,loss,lr", "0,,2.0,0.1", "1,,1.0,0.05", "2,,0.25,", "3,,0.0,1.0"]


def test_an_older_row_can_change(path: Path) -> None:
    made = log(path, (0, {"loss": 2.0}), (5, {"loss": 1.0}))
    log(path, (3, {"loss": 1.5}), (0, {"loss": 9.0}), into=made)
    assert lines(path) == ["step,epoch,loss", "0,,9.0", "3,,1.5", "5,,1.0"]


def test_a_resumed_run_keeps_earlier_rows_and_overwrites_later_ones(path: Path) -> None:
    log(path, *((step, {"loss": 10.0 - step, "old": 1.0}) for step in range(6)))
    log(path, (3, {"loss": 0.3, "new": 2.0}), (4, {"loss": 0.4}))
    assert lines(path) == [
        "step,epoch,loss,old,new",
        "0,,10.0,1.0,",
        "1,,9.0,1.0,",
        "2,,8.0,1.0,",
        "3,,0.3,1.0,2.0",
        "4,,0.4,,",
    ]


def test_a_resumed_run_that_logs_nothing_changes_nothing(path: Path) -> None:
    log(path, (0, {"loss": 2.0}))
    before = path.read_bytes()
    logger(path).finalize("success")
    assert path.read_bytes() == before


@pytest.mark.parametrize("rest", ["7,,0.1234", "7", "\n", "\0\0\0", "nonsense,1\n"])
def test_an_incomplete_last_row_is_dropped(path: Path, rest: str) -> None:
    log(path, (0, {"loss": 2.0}), (5, {"loss": 1.0}))
    path.write_text(path.read_text() + rest)
    log(path, (9, {"loss": 0.5}))
    assert lines(path) == ["step,epoch,loss", "0,,2.0", "5,,1.0", "9,,0.5"]


def test_a_file_changed_by_others_is_rewritten(path: Path) -> None:
    made = log(path, (0, {"loss": 2.0}), (5, {"loss": 1.0}))
    path.write_text(path.read_text().replace("2.0", "2.000"))
    log(path, (6, {"loss": 0.5}), into=made)
    assert lines(path) == ["step,epoch,loss", "0,,2.000", "5,,1.0", "6,,0.5"]
    path.unlink()
    log(path, (7, {"loss": 0.25}), into=made)
    assert lines(path) == ["step,epoch,loss", "7,,0.25"]


def test_values_round_trip_exactly(path: Path) -> None:
    torch.manual_seed(0)
    values = [*torch.randn(300, dtype=torch.float64).tolist(), *torch.randn(300).exp().tolist()]
    values += [1e-320, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0, 2.0**53 + 2]
    log(path, *((step, {'a,"b"': value, "t": torch.tensor(value).double()}) for step, value in enumerate(values)))  # type: ignore[dict-item]
    table = pd.read_csv(path, dtype=str).astype(float)
    assert table['a,"b"'].tolist() == values
    assert math.copysign(1, table['a,"b"'][604]) == -1
    log(path.with_name("b.csv"), (0, {"x": math.inf, "y": -math.inf, "z": math.nan, "epoch": 3.0}))
    row = pd.read_csv(path.with_name("b.csv")).loc[0]
    assert (row.x, row.y, row.epoch) == (math.inf, -math.inf, 3)
    assert math.isnan(row.z)


def test_other_ranks_write_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    log(path, (0, {"loss": 2.0}))
    assert not path.parent.exists()


def test_it_writes_periodically(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CSVLogger(path, seconds_between_writes=0.2)
    written: list[int] = []
    write = made._write
    monkeypatch.setattr(made, "_write", lambda: (written.append(1), write()))
    began = time.monotonic()
    for step in range(50):
        made.log_metrics({"loss": float(step)}, step)
        made.save()
        time.sleep(0.01)
    deadline = time.monotonic() + 10
    while (
        not path.is_file() or lines(path)[-1] != "49,,49.0"
    ):  # the last row is written although nothing more is logged
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(written) <= (time.monotonic() - began) / 0.2 + 1
    made.finalize("success")


def test_the_cost_does_not_grow_with_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = log(path, *((step, {"loss": 1.0}) for step in range(5000)))
    monkeypatch.setattr(made, "_write_all", None)
    monkeypatch.setattr(made, "_read", None)
    formatted: list[int] = []
    format_lines = made._lines
    monkeypatch.setattr(made, "_lines", lambda rows: (formatted.append(len(rows)), format_lines(rows))[1])
    for step in range(5000, 5010):
        log(path, (step, {"loss": 0.5}), (step, {"epoch": 1}), into=made)
    assert formatted == [1] * 10
    assert not made._pending
    monkeypatch.undo()
    assert len(pd.read_csv(path)) == 5010


def test_the_file_is_never_incomplete(path: Path) -> None:
    made, stop = logger(path), threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            if path.is_file():
                text = path.read_text()
                assert text.endswith("\n")
                seen.append(text.count("\n"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(300):
            log(path, (step, {"loss": 1.0, f"column{step // 10}": 2.0}), into=made)
    finally:
        stop.set()
        reader.join()
    assert seen == sorted(seen)
    assert not list(path.parent.glob(".*"))


KILLED = """
import sys, time
from boltcutter.logger.csv_logger import CSVLogger

logger = CSVLogger(sys.argv[1])
for step in range(100_000):
    logger.log_metrics({"loss": 1 / (step + 1)} | ({"val/loss": 0.5} if step % 10 == 9 else {}), step)
    logger.save()
    print(time.time(), step, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_killed_process_loses_about_a_second(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True)
    time.sleep(0.1)
    assert process.stdout is not None
    steps: dict[int, float] = {}
    for line in process.stdout:
        when, step = line.split()
        steps[int(step)] = float(when)
        if int(step) == 250:
            process.send_signal(signal.SIGKILL)
            killed = time.time()
            break
    process.wait(10)
    process.stdout.close()
    kept = pd.read_csv(path, dtype=str).astype(float)
    assert kept["step"].tolist() == list(range(len(kept)))
    assert killed - steps[len(kept) - 1] < 2.5
    assert kept["loss"].tolist() == [1 / (step + 1) for step in kept["step"]]


def test_a_failed_write_warns_once_and_keeps_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("in the way")
    made = CSVLogger(tmp_path / "run" / "metrics.csv", seconds_between_writes=0.01)
    for step in range(3):
        made.log_metrics({"loss": 1.0}, step)
        made.save()
        made.finalize("failed")
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert warning.startswith(f"warning: {tmp_path}/run/metrics.csv: not written (")
    (tmp_path / "run").unlink()
    made.finalize("success")
    assert pd.read_csv(tmp_path / "run" / "metrics.csv")["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("space", [3, 12])  # for a part of the extended row, and for a part of the next one
def test_a_partial_write_on_a_full_disk_is_completed_later(
    path: Path, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # pytest's is a file
    made = log(path, (0, {"a": 1.0, "b": 0.25}), (1, {"a": 2.0}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + space, before[1]))
        log(path, (1, {"b": 0.123456789}), (2, {"a": 3.0, "b": 0.5}), into=made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log(path, (3, {"a": 4.0}), into=made)
    assert lines(path)[1:] == ["0,,1.0,0.25", "1,,2.0,0.123456789", "2,,3.0,0.5", "3,,4.0,"]


def test_the_logger_can_be_pickled(path: Path) -> None:
    copy = pickle.loads(pickle.dumps(logger(path)))
    assert (copy.path, copy.seconds_between_writes) == (path, 3600)
    assert (copy.name, copy.version, copy.save_dir) == ("csv", "", str(path.parent))


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("train/loss", self.weight.sum())
        return self.weight.sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.weight.sum())

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.weight.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_training_testing_and_resuming(path: Path) -> None:
    loader = DataLoader(torch.zeros(4, 1), 1)  # type: ignore[arg-type]
    table = pd.DataFrame()
    for attempt, epochs in enumerate((2, 3)):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=CSVLogger(path),
            log_every_n_steps=2,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=path.parent,
        )
        options = {"ckpt_path": path.parent / "a.ckpt", "weights_only": True} if attempt else {}
        trainer.fit(Task(), loader, loader, **options)  # type: ignore[arg-type]
        trainer.save_checkpoint(path.parent / "a.ckpt")
        trainer.test(Task(), loader, verbose=False)
        table = pd.read_csv(path)
    assert table["step"].is_monotonic_increasing
    assert table.dropna(subset="train/loss")["step"].tolist() == [1, 3, 5, 7, 9, 11]
    assert table["val/loss"].dropna().tolist() == [0.5, 0.0, -0.5]
    assert table["train/loss"].dropna().tolist() == [0.875, 0.625, 0.375, 0.125, -0.125, -0.375]
    assert table.dropna(subset="test/loss")["step"].tolist() == [8, 12]
