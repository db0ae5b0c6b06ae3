"""Does ``boltcutter try`` keep its promises? Real studies of changes that do nothing (A/A) and of real changes (A/B).

    python scripts/studies/try.py build/try               # 60 and 60 studies; continues where it was stopped
    python scripts/studies/try.py build/try --table       # the table of docs/try.md, of the studies so far

Each study is the command itself with its journal, ledger and verdict, in a project with a Git repository. Only the
start of Python is saved: trainings are forked from this process, which has imported all modules and has one thread.

A change that does nothing throws away one random number before the weights are drawn, so that these are others.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NOTHING = "model.draws=1"
BLOCKS = 30  # of seeds, each of which has one A/A study of a data set
AB_BLOCKS = 6  # of these that have also one study of each real change, against the same runs of the baseline
COMMON = "model=drawn logger=csv model.hidden_sizes=[32] optimizer.lr=0.003 " + " ".join(
    f"callback.{name}=null" for name in ("best", "last", "invariants", "ledger", "learning_rate", "throughput", "guard")
)
# By data set: baseline, metric, effect (about 1.5 standard deviations of the differences of A/A), real changes.
DATA: dict[str, tuple[str, str, float, list[str]]] = {
    "digits": (
        f"data=digits {COMMON} trainer.max_epochs=4",
        "val/accuracy",
        0.06,
        [
            "optimizer.lr=0.01",
            "model.hidden_sizes=[48]",
            "model.dropout=0.2",
            "model.activation=gelu",
            "model.norm=layernorm",
        ],
    ),
    "diabetes": (
        f"experiment=diabetes {COMMON} trainer.max_epochs=8",
        "val/rmse",
        6.0,
        [
            "optimizer.lr=0.01",
            "model.hidden_sizes=[48]",
            "model.dropout=0.2",
            "model.activation=gelu",
            "model.norm=layernorm",
        ],
    ),
}
MODEL = '''"""An MLP whose weights are drawn after some random numbers that nothing uses."""

import torch
from boltcutter.model.mlp import MLP


class Drawn(MLP):
    def __init__(self, draws: int = 0, **arguments):
        torch.rand(draws)
        super().__init__(**arguments)
'''


# --- trainings without the start of Python ---


class Forked:
    """What ``Trial`` uses of ``subprocess.Popen``, for ``python -m boltcutter train``."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: Any,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert arguments[1:4] == ["-m", "boltcutter", "train"]
        self.returncode: int | None = None
        self.pid = fork(arguments[3:], env, stdout.fileno(), stderr.fileno(), pass_fds)

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status."""
        end = time.monotonic() + (timeout or 3600)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("train", timeout or 3600)
            time.sleep(0.005)
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


PATH, VARIABLES = list(sys.path), dict(os.environ)
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow


def fork(
    arguments: Sequence[str], env: Mapping[str, str], output: int, errors: int, pass_fds: Sequence[int] = ()
) -> int:
    """Run ``boltcutter <arguments>`` in a fork of this process, and return its process ID."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in pass_fds:
                with suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(env)
        sys.path[:] = PATH
        for module in [name for name in sys.modules if name.partition(".")[0] == "studied"]:
            del sys.modules[module]
        sys.argv[:] = ["boltcutter", *arguments]
        from boltcutter.cli.commands import main

        main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def prepare() -> None:
    """Import what a training imports."""
    import pkgutil

    import boltcutter
    from boltcutter.search import trial

    packages = "assembly callback checkpoint checks cli config data diagnosis environment evaluation logger model run"
    packages += " task training tries analysis report launch"
    for found in pkgutil.walk_packages(boltcutter.__path__, "boltcutter."):
        if found.name.split(".")[1] in packages.split() and not {"keras", "ray", "wandb"} & {
            *found.name.replace("_", ".").split(".")
        }:
            with suppress(ImportError):
                importlib.import_module(found.name)
    for name in ("sklearn.datasets", "sklearn.model_selection", "pandas"):
        importlib.import_module(name)
    trial.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined, assignment]
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    threads = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
    assert len(threads) == 1, f"a fork would have only one of the threads {threads}"
    gc.collect()
    gc.freeze()


# --- the studies ---


def make_project(folder: Path) -> None:
    """A project with the model, in a repository, so that runs of the baseline are recognized."""
    if (folder / ".git").is_dir():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "src" / "studied").mkdir(parents=True)
    (folder / "configs" / "model").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[tool.boltcutter]\npackage = "studied"\n')
    (folder / "src" / "studied" / "__init__.py").write_text("")
    (folder / "src" / "studied" / "drawn.py").write_text(MODEL)
    import boltcutter

    text = (Path(boltcutter.__file__).parent / "configs" / "model" / "mlp.yaml").read_text()
    text = text.replace("boltcutter.model.mlp.MLP", "studied.drawn.Drawn")
    (folder / "configs" / "model" / "drawn.yaml").write_text(text + "draws: 0  # random numbers that nothing uses\n")
    git = ["git", "-C", str(folder), "-c", "user.name=study", "-c", "user.email=study@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A model"]):
        subprocess.run([*git, *command], check=True)


def studies() -> list[tuple[str, str, str, int]]:
    """Kind, data set, change and block of seeds of each study, data sets in turn."""
    found = []
    for block in range(BLOCKS):
        for data, (_, _, _, changes) in DATA.items():
            found.append(("A/A", data, NOTHING, block))
            found += [("A/B", data, change, block) for change in changes if block < AB_BLOCKS]
    return sorted(found, key=lambda study: study[3])


def run_study(place: Path, kind: str, data: str, change: str, block: int) -> dict[str, Any]:
    """Run a study by the command, and return its result."""
    baseline, metric, effect, _ = DATA[data]
    arguments = ["try", change, f"against={baseline}", f"metric={metric}", f"effect={effect}", f"seed={1000 * block}"]
    arguments += [f"runs={place / 'runs' / data / f'{block:02d}'}", "--json"]
    output, begin = place / "last.json", time.monotonic()
    with open(output, "wb") as file, open(place / "last.log", "wb") as log:
        env = VARIABLES | {"BOLTCUTTER_PROJECT": str(place / "project")}
        pid = fork(arguments, env, file.fileno(), log.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = output.read_text()
    if status not in (0, 1, 3) or '"verdict"' not in text:
        raise SystemExit(f"{' '.join(arguments)}: ended with {status}:\n{text[-3000:]}")
    result = json.loads(text)["result"]
    keys = ("verdict", "pairs", "difference", "low", "high", "runs", "reused")
    values = [
        (pair["change"]["value"] - pair["baseline"]["value"]) * (-1 if metric.endswith("rmse") else 1)
        for pair in result["all_pairs"]
    ]
    return {
        "kind": kind,
        "data": data,
        "change": change,
        "block": block,
        "status": status,
        "metric": metric,
        "effect": effect,
        **{key: result[key] for key in keys},
        "differences": values,
        "seconds": round(time.monotonic() - begin, 1),
    }


def read(file: Path) -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def table(results: Sequence[dict[str, Any]]) -> str:
    """How the studies have ended, as Markdown."""
    import statistics

    names = ["data, metric, effect", "change", "studies", "accepted", "rejected", "undecided", "pairs", "trained runs"]
    names += ["mean difference, in effects", "interval holds it"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    keys = sorted(
        {(r["kind"], r["data"], r["change"]) for r in results}, key=lambda key: (key[0], [*DATA].index(key[1]))
    )
    for key in keys:
        own = [r for r in results if (r["kind"], r["data"], r["change"]) == key]
        effect, kind = own[0]["effect"], key[0]
        pooled = [value for r in own for value in r["differences"]]
        mean = statistics.fmean(pooled)
        error = statistics.stdev(pooled) / len(pooled) ** 0.5
        truth = 0.0 if kind == "A/A" else mean
        holds = sum((r["low"] is None or r["low"] <= truth) and (r["high"] is None or r["high"] >= truth) for r in own)
        count = {word: sum(r["verdict"] == word for r in own) for word in ("accepted", "rejected", "undecided")}
        name = "nothing (A/A)" if kind == "A/A" else f"`{key[2]}`"
        cells = [f"{key[1]}, `{own[0]['metric']}`, {effect:g}", name, len(own), *count.values()]
        cells += [f"{statistics.fmean(r[what] for r in own):.1f}" for what in ("pairs", "runs")]
        cells += [f"{mean / effect:+.2f} ± {error / effect:.2f}", f"{holds} of {len(own)}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Run the studies that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where projects, runs and results are kept")
    parser.add_argument("--table", action="store_true", help="print the table of the studies so far")
    parser.add_argument("--most", type=int, default=10**6, help="studies to run now")
    given = parser.parse_args()
    place = given.folder.absolute()
    results = place / "results.jsonl"
    if not given.table:
        place.mkdir(parents=True, exist_ok=True)
        prepare()
        make_project(place / "project")
        done = {(r["kind"], r["data"], r["change"], r["block"]) for r in read(results)}
        for study in [study for study in studies() if study not in done][: given.most]:
            result = run_study(place, *study)
            with open(results, "a") as file:
                file.write(json.dumps(result) + "\n")
            for folder in (place / "runs" / study[1]).glob("*/tries/*/*/checkpoints"):
                shutil.rmtree(folder)  # so that 2,000 runs need little space
            print(
                f"{len(read(results))}: {' '.join(map(str, study))}: {result['verdict']} after {result['pairs']} pairs",
                flush=True,
            )
    print(table(read(results)))


if __name__ == "__main__":
    main()
