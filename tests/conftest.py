"""What tests share: commands with a time limit, and small runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path

import pandas as pd
import pytest
import torch
from forkserver import ForkServer, communicate, rank_variables

ROOT = Path(__file__).parents[1]
STATE = {"state_dict": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}, "epoch": 3}  # of a checkpoint
QUICK = ["logger=null", "report=false", "trainer.max_epochs=2"]
torch.set_num_threads(1)  # as runs in processes of their own; two test processes with two threads each only wait
sys.modules["mpi4py"] = None  # Lightning's trainers would start MPI in this process

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for all quick tests; for some of them, or for slow ones, this process alone."""
    some = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.usepdb
    return 0 if some or "not slow" not in config.option.markexpr else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, which then makes their fixtures once, and all tests of the cluster."""
    for item in items:
        group = "cluster" if "cluster" in getattr(item, "fixturenames", ()) else str(item.path.relative_to(ROOT))
        item.add_marker(pytest.mark.xdist_group(group))


def saved_weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    """The weights in a run's checkpoint."""
    return dict(torch.load(folder / "checkpoints" / f"{which}.ckpt", weights_only=True)["state_dict"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The path of a checkpoint that holds ``STATE``."""
    from boltcutter.checkpoint import AtomicCheckpointIO

    AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "deep" / "last.ckpt")
    return tmp_path / "deep" / "last.ckpt"


def flip_a_bit(path: Path) -> None:
    """Damage the weights in a checkpoint that holds ``STATE``."""
    content = bytearray(path.read_bytes())
    content[content.index(STATE["state_dict"]["weight"].numpy().tobytes()) + 5] ^= 1  # type: ignore[index]
    path.write_bytes(content)


def max_difference(one: Path, other: Path) -> float:
    """The largest difference between the last weights of two runs."""
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def assert_same(one: Path, other: Path) -> None:
    """Two runs ended with the same weights and scores, and tested the same samples, each once and in order."""
    assert max_difference(one, other) < 1e-6
    names = ["index", "target", "prediction"]
    a, b = (pd.read_csv(run / "evaluation" / "test" / "predictions.csv")[names] for run in (one, other))
    assert a.equals(b)
    ours, theirs = (json.loads((run / "record.json").read_text()) for run in (other, one))
    assert ours["test"] == pytest.approx(theirs["test"], abs=1e-6)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-5)


def environment(**changed: str) -> dict[str, str]:
    """That of this process without what would lead a run astray; offline, on one thread, with all warnings."""
    astray = ("WANDB_", "SLURM_", "BOLTCUTTER_", "PL_", "KMP_")  # the last: scikit-learn's, wherever it is imported
    clean = {k: v for k, v in os.environ.items() if not k.startswith(astray)}
    return clean | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONWARNINGS": "default"} | changed


def run_command(
    command: list[str], *, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in a process group of its own, so that none of its children outlives a time limit."""
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
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end in {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def require(*programs: str, install: str, package: str = "") -> None:
    """Skip the test that asks for what this machine lacks; where CI=true, fail instead.

    Args:
        programs: As the shell finds them.
        install: How they are installed.
        package: A Python distribution that is needed as well.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if package and not list(distributions(name=package)):
        missing.append(package)
    if missing:
        found = f"{', '.join(missing)} not found: {install}"
        pytest.fail(found) if os.environ.get("CI") == "true" else pytest.skip(found, allow_module_level=True)


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Starts commands without the seconds that their imports take."""
    server = ForkServer(environment())
    yield server
    server.close()


def run_forked(
    forks: ForkServer, argv: list[str], *, ranks: int = 0, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run as one process, or as ``ranks`` with what torchrun would tell each; ended when all of them are."""
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
            said, ended = communicate(started, [out, err], timeout)
    finally:
        os.close(out)
        os.close(err)
    if not ended:
        pytest.fail(f"{' '.join(argv)} did not end in {timeout} s\n{said[0]}\n{said[1]}")
    failures = [process.returncode for process in started if process.returncode]
    return subprocess.CompletedProcess(argv, failures[0] if failures else 0, *said)


@pytest.fixture(scope="session")
def script(forks: ForkServer) -> Script:
    """Run one of ``scripts`` with words: forked, as nearly all tests may, or as a ``fresh`` interpreter."""

    def call(name: str, *words: str, fresh: bool = False, **options: object) -> subprocess.CompletedProcess[str]:
        argv = [f"scripts/{name}.py", *words]
        if fresh:
            return run_command([sys.executable, *argv], **options)  # type: ignore[arg-type]
        return run_forked(forks, argv, **options)  # type: ignore[arg-type]

    return call


@pytest.fixture(scope="session")
def torchrun() -> Script:
    """Run one of ``scripts`` in two processes of the real torchrun; ``script(…, ranks=2)`` has its variables."""

    def call(name: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_command([*TORCHRUN, f"scripts/{name}.py", *words], **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def two_ranks(forks: ForkServer, tmp_path: Path) -> Script:
    """Run code in two processes that leave together."""

    def call(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "ranks.py"
        body = "\n".join(f"    {line}" for line in code.strip().split("\n"))
        imported = "from boltcutter.environment.process import distributed_shutdown"
        file.write_text(f"{imported}\nwith distributed_shutdown():\n{body}\n")
        done = run_forked(forks, [str(file), *words], ranks=2)
        assert done.returncode == 0, done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def trained(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of the default configuration, with W&B and report. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = script("train", f"folder={folder}", "trainer.max_epochs=6")
    assert done.returncode == 0, done.stderr
    return folder
