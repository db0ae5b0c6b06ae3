"""Shared helpers and fixtures: commands with a timeout, and short runs."""

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from textwrap import indent
from typing import Any, NoReturn

import boltcutter  # noqa: F401  before Lightning, so that torchmetrics is imported without transformers

# isort: split
import pandas as pd
import pytest
import torch
from browser import browse as browse
from browser import chromium as chromium
from browser import open_tab as open_tab
from forkserver import ForkServer, communicate, last_of_each, rank_variables
from lightning.pytorch.loggers import Logger
from object_storage import bucket as bucket
from object_storage import place as place
from object_storage import s3_variables as s3_variables
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
STATE = {
    "state_dict": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)},
    "epoch": 3,
}  # contents of a checkpoint
QUICK = ["logger=null", "report=false", "trainer.max_epochs=2"]
torch.set_num_threads(1)  # as in the runs; two test processes with two threads each would compete for cores
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup; the processes that tests start must receive it
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that starts the suite in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["mpi4py"] = None  # Lightning's trainers would start MPI in this process

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# All warnings but that of a temporary folder which torch creates when it is imported, and does not remove.
WARNINGS = "default,ignore:Implicitly cleaning up:ResourceWarning"

Script = Callable[..., subprocess.CompletedProcess[str]]
Train = Callable[..., None]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, whose results differ by rounding, unless ``pytest -m gpu`` tests them."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use three workers for the whole quick suite, as tests wait for processes; none for selected or slow tests."""
    selected = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.usepdb
    return 0 if selected or "not slow" not in config.option.markexpr else 3


# Files and folders of a minute and more, and those whose tests wait, begin first: none is left alone at the end.
LONGEST = ("test_style", "test_new", "test_wandb", "test_faults", "test_model_parallel", "test_preemption", "export")
# Seconds of slow tests on two busy cores, 2026-11-27: of the groups with the most, and of a test of any other.
SECONDS = {
    "cluster": 3200,
    "tests/test_commands.py": 1300,
    "tests/launch/test_image.py": 1300,
    "tests/test_examples.py": 1200,
    "tests/test_fuzz.py": 1100,
    "tests/test_faults.py": 1000,
    "tests/task/test_compiler.py": 900,
    "tests/benchmarks/test_search.py": 600,
}
SECONDS_OF_OTHERS = 17


def pytest_unconfigure() -> None:
    """End with the exit status of the tests, also after one that has simulated a failed GPU."""
    if failure := sys.modules.get("boltcutter.training.failure"):
        atexit.unregister(failure._end_without_finalization)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while files are imported: searching the growing heap again and again takes seconds."""
    gc.disable()
    collected = yield
    gc.freeze()  # modules stay
    atexit.register(gc.unfreeze)  # else libraries report them as leaked
    gc.enable()
    return collected


@pytest.hookimpl(wrapper=True)  # before xdist reads the groups, and after tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Run all tests of a file, and all that share the cluster or exported runs, in one worker: each is set up once.

    With ``SHARD=1/6``, only those of the selected tests are kept that take about a sixth of the time, in whole groups.
    """
    groups, files = {}, {path: str(path.relative_to(ROOT)) for path in {item.path for item in items}}
    for item in items:
        group, fixtures = files[item.path], getattr(item, "fixturenames", ())
        if "cluster" in fixtures:
            group = "cluster"
        elif item.path.parent.name == "export" and {"digits", "diabetes", "gpt"} & {*fixtures}:
            group = "exports"
        item.add_marker(pytest.mark.xdist_group(group))
        groups[item] = group
        own, slow = item.get_closest_marker("timeout"), item.get_closest_marker("slow")
        if config.getoption("timeout") is None:
            limit = patience(own.args[0] if own else 900 if slow else float(config.getini("timeout")))
            item.add_marker(pytest.mark.timeout(limit), append=False)
    items.sort(key=lambda item: item.path.stem not in LONGEST and item.path.parent.name not in LONGEST)
    result = yield
    if shard := os.environ.get("SHARD"):
        index, count = shard.split("/")
        sizes = Counter(groups[item] for item in items)
        seconds = {group: SECONDS.get(group, SECONDS_OF_OTHERS * size) for group, size in sizes.items()}
        kept = shards(seconds, int(count))[int(index) - 1]
        config.hook.pytest_deselected(items=[item for item in items if groups[item] not in kept])
        items[:] = [item for item in items if groups[item] in kept]
    return result


def patience(seconds: float) -> float:
    """Return the time limit of a busy machine from that of one which is not."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def shards(seconds: Mapping[str, int], count: int) -> list[set[str]]:
    """Distribute groups of tests by their seconds: the longest first, each to the shard with the fewest."""
    found: list[set[str]] = [set() for _ in range(count)]
    for group in sorted(seconds, key=lambda group: (-seconds[group], group)):
        min(found, key=lambda shard: sum(seconds[other] for other in shard)).add(group)
    return found


def saved_weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    """Load the state dict of a run's checkpoint."""
    return dict(torch.load(folder / "checkpoints" / f"{which}.ckpt", weights_only=True)["state_dict"])


@pytest.fixture(autouse=True)
def unchanged_signal_handlers() -> Iterator[None]:
    """Assert that a test leaves no signal handlers behind, which would change how later tests end."""
    from boltcutter.environment import stop_signals as signals

    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    left = {number.name for number in signals.SIGNALS if signal.getsignal(number) != before[number]}
    signals.restore_handlers()
    assert not left, f"signal handlers that the test did not restore: {left}"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Path of a checkpoint that contains ``STATE``."""
    from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO

    AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "deep" / "last.ckpt")
    return tmp_path / "deep" / "last.ckpt"


def flip_a_bit(path: Path) -> None:
    """Damage the weights in a checkpoint that contains ``STATE``."""
    content = bytearray(path.read_bytes())
    content[content.index(STATE["state_dict"]["weight"].numpy().tobytes()) + 5] ^= 1  # type: ignore[index]
    path.write_bytes(content)


def max_difference(one: Path, other: Path) -> float:
    """Return the maximum absolute difference between the last weights of two runs."""
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def assert_same(one: Path, other: Path) -> None:
    """Assert that two runs have the same weights, metrics and test predictions, in the same order."""
    assert max_difference(one, other) < 1e-6
    names = ["index", "target", "prediction"]
    a, b = (pd.read_csv(run / "evaluation" / "test" / "predictions.csv")[names] for run in (one, other))
    assert a.equals(b)
    ours, theirs = (json.loads((run / "record.json").read_text()) for run in (other, one))
    assert ours["test"] == pytest.approx(theirs["test"], abs=1e-6)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-5)


def assert_same_history(one: Path, other: Path) -> None:
    """Assert that two runs have logged the same values at the same steps, to rounding, apart from throughput."""
    tables = [pd.read_csv(run / "metrics.csv").filter(regex="^(?!throughput/)") for run in (one, other)]
    pd.testing.assert_frame_equal(*tables, check_like=True, check_dtype=False, rtol=1e-6, atol=1e-5)


def assert_learns(model: nn.Module, *, lr: float, steps: int) -> None:
    """Assert that a model of 8 x 8 images learns a small batch, and that each trainable parameter has a gradient."""
    x, y = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in trainable)
    assert nn.functional.cross_entropy(model.eval()(x), y) < 0.1


SYNCHRONIZING = {
    "_local_scalar_dense",  # item, float, bool, int
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
    "equal",
}


class Synchronizations(TorchDispatchMode):
    """Counts operations that synchronize the host with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCHRONIZING:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


class RecordingLogger(Logger):
    """Stores the metrics of each step."""

    name, version = "recorded", ""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    def values(self, name: str) -> dict[int, float]:
        return {step: row[name] for step, row in self.rows if name in row}


def environment(**changed: str) -> dict[str, str]:
    """Return environment variables for a run: those of this process without ones that change runs, and W&B offline."""
    removed = ("WANDB_", "SLURM_", "BOLTCUTTER_", "PL_")
    removed += ("KMP_", "PYTORCH_NVML_", "RAY_CLIENT_", "TORCHINDUCTOR_")  # set by libraries in this process
    clean = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
    return clean | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONWARNINGS": WARNINGS} | changed


def run_command(
    command: list[str], *, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session, so that all of its children are killed after a timeout."""
    command = last_of_each(command)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**(env or {})),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=patience(timeout))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end in {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def require(*programs: str, install: str, package: str = "") -> None:
    """Skip a test whose requirements are not installed; with CI=true, fail instead.

    Args:
        programs: Names of executables.
        install: Instructions for the installation.
        package: Name of a required Python distribution.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if package and not list(distributions(name=package)):
        missing.append(package)
    if missing:
        unavailable(f"{', '.join(missing)} not found: {install}")


def unavailable(what: str) -> NoReturn:
    """Skip a test that cannot run on this machine; with CI=true, fail instead."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what, allow_module_level=True)


AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of its own, as root or by sudo; raises OSError where neither may, as in a container."""
    folder.mkdir(parents=True)
    options = f"size={size},uid={os.getuid()}"
    mount = [*AS_ROOT, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"no disk can be mounted on this machine: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*AS_ROOT, "umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(tmp_path / "disk", "2m"))
        except OSError as error:
            unavailable(str(error))
        yield disk


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """A server that starts commands by forking, without the time for imports."""
    with closing(ForkServer(environment())) as server:
        yield server


def run_forked(
    forks: ForkServer, argv: list[str], *, ranks: int = 0, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in one process, or in ``ranks`` processes with torchrun's variables, and wait for all."""
    variables = rank_variables(ranks) if ranks else [{}]
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    try:
        with ExitStack() as stack:
            try:
                started = [
                    stack.enter_context(forks.start(argv, environment(**(env or {}), **rank), to_out, to_err))
                    for rank in variables
                ]
            finally:
                os.close(to_out)
                os.close(to_err)
            outputs, ended = communicate(started, [out, err], patience(timeout))
    finally:
        os.close(out)
        os.close(err)
    if not ended:
        pytest.fail(f"{' '.join(argv)} did not end in {timeout} s\n{outputs[0]}\n{outputs[1]}")
    failures = [process.returncode for process in started if process.returncode]
    return subprocess.CompletedProcess(argv, failures[0] if failures else 0, *outputs)


@pytest.fixture(scope="session")
def script(forks: ForkServer) -> Script:
    """Run one of ``scripts`` with overrides: forked, or with ``fresh=True`` in a new interpreter."""

    def call(name: str, *overrides: str, fresh: bool = False, **options: object) -> subprocess.CompletedProcess[str]:
        argv = [f"scripts/{name}.py", *overrides]
        if fresh:
            return run_command([sys.executable, *argv], **options)  # type: ignore[arg-type]
        return run_forked(forks, argv, **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def train(script: Script) -> Train:
    """Train with these overrides, without logger and report; tests that ``boltcutter add`` writes use this."""

    def call(*overrides: str) -> None:
        done = script("train", *QUICK, "test=false", *overrides)
        assert done.returncode == 0, done.stderr

    return call


@pytest.fixture(scope="session")
def torchrun() -> Script:
    """Run one of ``scripts`` with torchrun in two processes; ``script(…, ranks=2)`` only sets its variables."""

    def call(name: str, *overrides: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_command([*TORCHRUN, f"scripts/{name}.py", *overrides], **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def two_ranks(forks: ForkServer, tmp_path: Path) -> Script:
    """Run code in two processes, with ``distributed_shutdown``."""

    def call(code: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "ranks.py"
        imported = "from boltcutter.environment.process import distributed_shutdown"
        file.write_text(f"{imported}\nwith distributed_shutdown():\n{indent(code.strip(), '    ')}\n")
        done = run_forked(forks, [str(file), *overrides], ranks=2)
        assert done.returncode == 0, done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def trained(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a short run of the default configuration, with W&B and report. Do not modify."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = script("train", f"folder={folder}", "trainer.max_epochs=6")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def hand_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let another user own a file or a folder with all that is in it, or, without root, let this process be another."""

    def change(path: Path) -> None:
        if (user := os.geteuid()) == 0:
            for place in (path, *path.rglob("*")):
                os.lchown(place, 54321, 54321)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
            monkeypatch.setenv("HOME", "/")

    return change
