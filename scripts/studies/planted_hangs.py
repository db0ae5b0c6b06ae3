"""Plant hangs whose places are known; does a run say where, and is anything left? The table of docs/reliability.md.

python scripts/studies/planted_hangs.py [<hang> …]

``TIMEOUT=40`` and ``PARALLEL=1``: seconds until a run says where it hangs, and runs at a time.
``BOLTCUTTER_KEEP=1`` keeps what they print.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TIMEOUT = float(os.environ.get("TIMEOUT", 40))  # seconds, in which ranks start also on a busy machine
WITHIN = 30.0  # seconds after the timeout within which the place has to be said, and after the end the processes gone
MARK = "BOLTCUTTER_PLANTED"  # in the environment of all processes of a run, by which those that are left are found

CODE = '''
import hashlib, multiprocessing, os, signal, socket, subprocess, sys, threading, time, urllib.request
import ctypes
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

HANG = os.environ["HANG"]


def rank():
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or RANK[0])


RANK = [0]  # of a forked rank


def here(name, at=1):
    """Whether a rank, or each with None, hangs at this place; then a file says since when."""
    if HANG == name and at in (None, rank()):
        open(os.environ["SCRATCH"] + "/begun", "a").close()
        return True
    return False


class Data(Dataset):
    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index > 20 and here("getitem"):
            threading.Event().wait()  # at getitem
        if index > 20 and here("loader-on-socket"):
            ends = socket.socketpair()
            ends[0].recv(1)  # at loader-on-socket
        if torch.utils.data.get_worker_info() and index > 20 and here("loader-worker", None):
            time.sleep(10**6)  # at loader-worker
        if torch.utils.data.get_worker_info() and index > 20 and here("worker-stopped", None):
            os.kill(os.getpid(), signal.SIGSTOP)
        if torch.utils.data.get_worker_info() and index > 20 and here("worker-queue"):
            multiprocessing.Queue().get()  # at worker-queue
        return torch.randn(4), torch.randn(1)


class Batches(IterableDataset):
    is_sharded = True

    def __iter__(self):
        for _ in range(4 if rank() else 12):
            yield torch.randn(4, 4), torch.randn(4, 1)
        here("batches")


class Endless(IterableDataset):
    def __iter__(self):
        if here("loader-iter", 0):
            socket.create_server(("127.0.0.1", 0)).accept()  # at loader-iter
        yield from Data()


class DataModule(L.LightningDataModule):
    def __init__(self, num_workers=0, batch_size=4):
        super().__init__()
        self.num_workers = num_workers

    def prepare_data(self):
        if here("prepare", 0):
            time.sleep(10**6)  # at prepare

    def setup(self, stage):
        RANK[0] = self.trainer.global_rank
        if here("setup", 0):
            open_fifo()

    def loader(self):
        return DataLoader(Data(), batch_size=4, num_workers=self.num_workers)

    def train_dataloader(self):
        if HANG == "batches":
            loader = DataLoader(Batches(), batch_size=None)
            loader.is_sharded = True
            return loader
        return DataLoader(Endless(), batch_size=4) if HANG == "loader-iter" else self.loader()

    val_dataloader = test_dataloader = loader

    def predict_dataloader(self):
        if here("predict-loader", 0):
            thread = threading.Thread(target=time.sleep, args=[10**6], daemon=True)
            thread.start()
            thread.join()  # at predict-loader
        return self.loader()


def open_fifo():
    path = os.environ["SCRATCH"] + "/fifo"
    if not os.path.exists(path):
        os.mkfifo(path)
    with open(path) as file:  # at setup
        file.read()


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def setup(self, stage):
        RANK[0] = self.trainer.global_rank

    def training_step(self, batch, number):
        if number == 3:
            self.hang()
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss)
        if number == 3 and here("extra-metric"):
            self.log("train/extra", loss, sync_dist=True)  # at extra-metric
        return loss

    def hang(self):
        if here("sleep") or here("sleep-fork") or here("sleep-spawn") or here("sleep-torchrun"):
            time.sleep(10**6)  # at sleep sleep-fork sleep-spawn sleep-torchrun
        if here("lock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # at lock
        if here("c-code"):
            mutex = ctypes.create_string_buffer(64)  # as zeros, one of C, which a signal does not interrupt
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # at c-code
        if here("hash"):
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # at hash
        if here("loop"):
            while True:  # at loop
                pass  # at loop
        if here("stopped") or here("stopped-torchrun"):
            os.kill(os.getpid(), signal.SIGSTOP)  # at stopped stopped-torchrun
        if here("collective"):
            torch.distributed.all_reduce(torch.ones(1))  # at collective
        if here("subprocess"):
            subprocess.run(["sleep", "1000000"])  # at subprocess
        if here("popen"):
            subprocess.Popen(["sleep", "1000000"]).wait()  # at popen
        if here("download"):
            server = socket.create_server(("127.0.0.1", 0))
            urllib.request.urlopen("http://127.0.0.1:%d" % server.getsockname()[1])  # at download

    def validation_step(self, batch, number):
        if not self.trainer.sanity_checking and number == 1 and here("validation"):
            time.sleep(10**6)  # at validation
        self.log("val/loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def test_step(self, batch, number):
        if number == 1 and here("test"):
            time.sleep(10**6)  # at test
        if number == 1 and here("evaluate", 0):
            time.sleep(10**6)  # at evaluate
        self.log("test/loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def predict_step(self, batch, number):
        if number == 1 and here("predict", 0):
            time.sleep(10**6)  # at predict
        return self.net(batch[0])

    def on_test_end(self):
        if here("evaluate-end", 0):
            time.sleep(10**6)  # at evaluate-end

    def teardown(self, stage):
        if here("teardown"):
            time.sleep(10**6)  # at teardown

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Hook(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if number == 3 and here("callback"):
            threading.Barrier(2).wait()  # at callback

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if here("checkpoint", 0):
            time.sleep(10**6)  # at checkpoint

    def on_fit_end(self, trainer, module):
        if here("end", 0):
            time.sleep(10**6)  # at end


class Logger(CSVLogger):
    def __init__(self, save_dir="."):
        super().__init__(os.environ["SCRATCH"] + "/csv")

    def finalize(self, status):
        if here("logger", 0):
            threading.Event().wait()  # at logger
        super().finalize(status)
'''


@dataclass(frozen=True)
class Hang:
    """A planted hang.

    Args:
        rank: The rank that hangs.
        launch: How the ranks are started: by Lightning, which runs the script again (``popen``), ``fork`` or
            ``spawn``, by ``torchrun``, or a single one.
        workers: Of loaders.
        command: That hangs.
        said: What is said where no line is known, of the rank or a process of it.
    """

    rank: int = 1
    launch: str = "popen"
    workers: int = 0
    command: str = "train"
    said: str = ""


HANGS = {
    "setup": Hang(rank=0, launch="single"),
    "sleep": Hang(),
    "lock": Hang(launch="fork"),
    "c-code": Hang(launch="fork"),
    "hash": Hang(launch="fork"),
    "loop": Hang(launch="fork"),
    "subprocess": Hang(),
    "stopped": Hang(),
    "sleep-fork": Hang(launch="fork"),
    "sleep-spawn": Hang(launch="spawn"),
    "sleep-torchrun": Hang(launch="torchrun"),
    "stopped-torchrun": Hang(launch="torchrun"),
    "loader-worker": Hang(rank=0, launch="single", workers=2),
    "worker-queue": Hang(launch="fork", workers=1),
    "loader-on-socket": Hang(launch="fork"),
    "getitem": Hang(launch="torchrun"),
    "collective": Hang(launch="fork"),
    "batches": Hang(said="validate, batch 0): waits for"),
    "extra-metric": Hang(launch="fork"),
    "callback": Hang(launch="fork"),
    "logger": Hang(rank=0, launch="single"),
    "checkpoint": Hang(rank=0, launch="single"),
    "validation": Hang(launch="spawn"),
    "test": Hang(launch="fork"),
    "evaluate": Hang(rank=0, launch="single", command="evaluate"),
    "predict": Hang(rank=0, launch="single", command="predict"),
    "end": Hang(rank=0, launch="single"),
    "prepare": Hang(rank=0, launch="single"),
    "popen": Hang(),
    "download": Hang(launch="fork"),
    "worker-stopped": Hang(rank=0, launch="single", workers=2, said=": stopped by a signal"),
    "loader-iter": Hang(rank=0, launch="single"),
    "teardown": Hang(launch="fork"),
    "predict-loader": Hang(rank=0, launch="single", command="predict"),
    "evaluate-end": Hang(rank=0, launch="single", command="evaluate"),
}


@dataclass
class Outcome:
    """What was found: seconds until the place was said and until all processes had ended, and how many were left."""

    said: float | None
    ended: float | None
    left: int
    line: str


def write_project(root: Path) -> Path:
    """A project with this data and module."""
    for group, name in (("data", "DataModule"), ("task", "Module"), ("callback", "Hook"), ("logger", "Logger")):
        (root / "configs" / group).mkdir(parents=True)
        more = "num_workers: 0\nbatch_size: 4\n" if group == "data" else ""
        entry = "planted:\n  " if group in ("callback", "logger") else ""
        (root / "configs" / group / "planted.yaml").write_text(
            f"# Planted.\n{entry}_target_: hanging_code.{name}\n{more}"
        )
    (root / "hanging_code.py").write_text(CODE)
    return root


def lines_of(name: str) -> list[int]:
    """The lines at which a hang is planted; none if it is in no line of the user's code."""
    return [n for n, line in enumerate(CODE.splitlines(), 1) if name in line.partition("# at ")[2].split()]


def processes(mark: str) -> list[psutil.Process]:
    """All processes of a run, whoever has started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_said(text: str, name: str, hang: Hang) -> str:
    """The line of the output in which the rank, the file and the line of a hang are; empty if there is none."""
    places = [f"hanging_code.py:{line} " for line in lines_of(name)] or [hang.said]
    for found in re.finditer(r"^.*(?:rank|process \d+ of rank) (\d+)\b.*$", text, re.MULTILINE):
        if int(found[1]) == hang.rank and any(place in found[0] for place in places):
            return found[0]
    return ""


def overrides(hang: Hang, folder: Path) -> list[str]:
    """The overrides of a training with a hang."""
    given = ["data=planted", "task=planted", "model=null", "logger=planted", "callback=[default,planted]"]
    given += [
        "report=false",
        f"folder={folder}",
        f"timeout={TIMEOUT:g}",
        "trainer.accelerator=cpu",
        "trainer.max_epochs=2",
    ]
    given += [f"data.num_workers={hang.workers}", "trainer.gradient_clip_val=null"]
    if hang.launch != "single":
        given += ["trainer=ddp", "trainer.devices=2"]
    if hang.launch in ("fork", "spawn"):
        given += [f"trainer.strategy.start_method={hang.launch}"]
    return given


def plant(name: str, scratch: Path) -> Outcome:
    """Start a run, and wait until it has said where it hangs, and has ended."""
    hang = HANGS[name]
    root, runs = scratch / "project", scratch / name
    runs.mkdir()
    run = runs / "run"
    variables = {
        **os.environ,
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        "SCRATCH": str(runs),
        MARK: str(runs),
        "OMP_NUM_THREADS": "1",
    }
    boltcutter = [sys.executable, "-m", "boltcutter"]
    train = ["train", *overrides(hang, run)]
    command = [*boltcutter, *train]
    if hang.launch == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "boltcutter",
        ]
        command += train
    if hang.command != "train":
        subprocess.run(command, env={**variables, "HANG": "nothing"}, cwd=root, check=True, capture_output=True)
        command = [*boltcutter, hang.command, f"run={run}"]
    return follow(command, {**variables, "HANG": name}, root, name, hang)


def follow(command: Sequence[str], variables: dict[str, str], root: Path, name: str, hang: Hang) -> Outcome:
    """Start a command, and see what it says, and what is left of it."""
    mark, output = variables[MARK], Path(variables["SCRATCH"], "output.txt")
    with output.open("wb") as file:
        started = subprocess.Popen(
            command, env=variables, cwd=root, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    outcome = Outcome(None, None, 0, "")
    begin = since = time.monotonic()
    begun = Path(variables["SCRATCH"], "begun")
    while time.monotonic() < begin + 14 * TIMEOUT + WITHIN:
        if not begun.exists():
            since = time.monotonic()
        seconds = time.monotonic() - since
        if outcome.said is None and (line := is_said(output.read_text(errors="replace"), name, hang)):
            outcome.said, outcome.line = seconds, line
        has_ended = started.poll() is not None
        if has_ended and outcome.ended is None:
            outcome.ended = seconds
        if has_ended and (not processes(mark) or seconds > (outcome.ended or 0) + WITHIN):
            break
        time.sleep(0.25)
    left = processes(mark)
    outcome.left = len(left)
    for process in left:
        print("left:", process.pid, process.cmdline()[:6], file=sys.stderr)
        process.send_signal(signal.SIGKILL)
    started.wait()
    return outcome


def main() -> None:
    """Print a row for each hang."""
    chosen = sys.argv[1:] or list(HANGS)
    scratch = Path(tempfile.mkdtemp(prefix="hangs-"))
    write_project(scratch / "project")
    print("| hang | ranks by | said after | ended after | left | printed |\n|---|---|---|---|---|---|")
    good = 0
    try:
        with ThreadPoolExecutor(int(os.environ.get("PARALLEL", 1))) as pool:
            for name, found in zip(chosen, pool.map(lambda name: plant(name, scratch), chosen), strict=True):
                good += found.said is not None and found.said < TIMEOUT + WITHIN and not found.left
                times = [
                    f"{seconds:.0f} s" if seconds is not None else "never" for seconds in (found.said, found.ended)
                ]
                line = found.line.strip().partition("  # at ")[0].replace("|", "/")
                line = line.replace(f"{scratch}/project/", "").replace(f"{ROOT}/src/boltcutter/", "")
                print(
                    "| " + " | ".join([name, HANGS[name].launch, *times, str(found.left), f"`{line}`"]) + " |",
                    flush=True,
                )
        print(f"\n{good} of {len(chosen)}")
    finally:
        if "BOLTCUTTER_KEEP" in os.environ:
            print(scratch, file=sys.stderr)
        else:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
