"""Pairs of runs with one planted difference: for the tests and the study of ``bisect``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planted import forked

from boltcutter.project import Project

PARTS = Path(__file__).with_name("pair_parts.py")
CHANGED = 137  # the sample that is changed
STEPS = 32
Edit = tuple[str, str, str]  # file, text, new text


@dataclass(frozen=True)
class Pair:
    """A difference, and what ``bisect`` has to answer.

    Args:
        second: Overrides of the second run.
        edit: Of its code.
        commits: Whether the edit is committed.
        kind: What of the step differs first.
        name: Of the module, parameter or option; empty: any.
        cause: A part of what is named as the cause.
        step: The first step that differs; None: that with the sample ``CHANGED``.
        both: Overrides of both runs.
        ranks: Number of ranks.
        workers: Of the loader.
        threads: Of both runs.
        variables: Value of PAIR_SCALE, an environment variable that the code reads, in both runs; not set if empty.
        packages: Version of the package ``planted-lib`` of both runs.
        resumes: Whether the second run was stopped after an epoch, and resumed.
        before: Override of each run in its first epoch; both are then resumed with ``task.lr=0.005``.
        preempted: Whether it got SIGTERM in its second epoch, and was resumed.
    """

    second: tuple[str, ...] = ()
    edit: Edit | None = None
    commits: bool = True
    kind: str = "module"
    name: str = ""
    cause: str = ""
    step: int | None = 1
    both: tuple[str, ...] = ()
    ranks: int = 1
    workers: int = 0
    threads: tuple[int, int] = (1, 1)
    variables: tuple[str, str] = ("", "")
    packages: tuple[str, str] = ("", "")
    resumes: bool = False
    before: tuple[str, str] = ("", "")
    preempted: bool = False


RELU = "        x = self.norm(x)\n        x = torch.relu(x)\n"
INIT = "        self.first = nn.Linear(6, hidden)\n        self.second = Rounded(hidden, 1, dtype)\n"
CODE = "parts.py"


def swapped(lines: str) -> str:
    """Two lines in the other order."""
    first, second, _ = lines.split("\n")
    return f"{second}\n{first}\n"


TWO_RANKS = ("trainer=ddp", "trainer.devices=2", "trainer.strategy.start_method=fork")
PAIRS: dict[str, Pair] = {
    "dropout rate": Pair(("task.dropout=0.2",), kind="module", name="net.dropout", cause="task.dropout"),
    "order of layers' init": Pair(edit=(CODE, INIT, swapped(INIT)), kind="initial weight", cause=CODE),
    "augmentation": Pair(("data.noise=0.1",), kind="input", cause="data.noise"),
    "a sample of the data file": Pair(("data.file=changed.pt",), kind="input", cause="data.file", step=None),
    "weight decay": Pair(("task.weight_decay=0.1",), kind="option", name="weight_decay", cause="task.weight_decay"),
    "clipping": Pair(("trainer.gradient_clip_val=0.01",), kind="used gradient", cause="trainer.gradient_clip_val"),
    "seed of workers": Pair(("data.worker_seed=1",), kind="input", cause="data.worker_seed", workers=2),
    "number of threads": Pair(
        both=("task.hidden=4096", "data.batch_size=128"), kind="", cause="threads", threads=(1, 2)
    ),
    "version of a library": Pair(packages=("1.0", "2.0"), kind="module input", cause="planted-lib"),
    "a commit that swaps two lines": Pair(
        edit=(CODE, RELU, swapped(RELU)), kind="module input", name="net.norm", cause=CODE
    ),
    "precision of one matmul": Pair(("task.dtype=bfloat16",), kind="module", name="net.second", cause="task.dtype"),
    "batch order": Pair(("data.order=1",), kind="samples", cause="data.order"),
    "seed of random numbers": Pair(
        ("callback.reseed.seed=1",), kind="module", name="net.dropout", cause="callback.reseed.seed"
    ),
    "BatchNorm momentum": Pair(("task.momentum=0.2",), kind="buffer", name="net.norm", cause="task.momentum"),
    "schedule off by one": Pair(("task.warmup=5",), kind="option", name="lr", cause="task.warmup"),
    "accumulation": Pair(("trainer.accumulate_grad_batches=2",), kind="samples", cause="trainer.accumulate_grad"),
    "EMA decay": Pair(
        ("callback.ema.decay=0.05",),
        kind="average",
        cause="callback.ema.decay",
        step=2,
        both=("callback=[default,ema]", "callback.ema.decay=0.1"),
    ),
    "default of an option": Pair(
        edit=("configs/task/pair.yaml", "lr: 0.01", "lr: 0.02"), kind="option", name="lr", cause="task.lr"
    ),
    "loss": Pair(("task.power=1.5",), kind="loss", cause="task.power"),
    "beta of Adam": Pair(("task.beta=0.99",), kind="option", name="betas", cause="task.beta"),
    "epsilon of Adam": Pair(("task.eps=1e-6",), kind="option", name="eps", cause="task.eps"),
    "batch size": Pair(("data.batch_size=8",), kind="samples", cause="data.batch_size"),
    "mixed precision": Pair(("trainer.precision=bf16-mixed",), kind="module", cause="trainer.precision"),
    "seed": Pair(("seed=1",), kind="samples", cause="seed"),
    "width of a layer": Pair(("task.hidden=17",), kind="initial weight", cause="task.hidden"),
    "step of unfreezing": Pair(
        ("task.unfreeze_at=9",),
        kind="weight gradient",
        name="net.second",
        cause="task.unfreeze_at",
        step=9,
        both=("task.unfreeze_at=8",),
    ),
    "uncommitted change": Pair(
        edit=(CODE, "torch.relu(x)", "torch.nn.functional.gelu(x)"), commits=False, kind="module input", cause=CODE
    ),
    "gradient scaled in one step": Pair(
        edit=(
            CODE,
            "        if self.global_step < self.unfreeze_at",
            "        if self.global_step == 11:\n"
            "            self.net.first.weight.grad *= 2\n        if self.global_step < self.unfreeze_at",
        ),
        kind="weight gradient",
        name="net.first",
        cause=CODE,
        step=12,
    ),
    "two settings without effect, and a line of code": Pair(
        ("tags=[b]", "callback.throughput=null"),
        edit=(CODE, ".abs().pow(", ".mul(1.001).abs().pow("),
        kind="loss",
        cause=CODE,
    ),
    "lr of a resumed run": Pair(("task.lr=0.02",), kind="option", name="lr", cause="task.lr", step=17, resumes=True),
    "dropout rate, 2 ranks": Pair(
        ("task.dropout=0.2",), kind="module", name="net.dropout", cause="task.dropout", ranks=2
    ),
    "environment variable": Pair(variables=("", "1.5"), kind="loss", cause="variable PAIR_SCALE"),
    "number of ranks": Pair((*TWO_RANKS, "data.batch_size=8"), kind="", cause="devices 1 → 2"),
    "rate before both were resumed with another": Pair(
        kind="option", name="lr", cause="task.lr=0.01 → 0.02", before=("task.lr=0.01", "task.lr=0.02")
    ),
    "a sample, 2 ranks, 2 workers": Pair(
        ("data.file=changed.pt",), kind="input", cause="data.file", step=None, ranks=2, workers=2
    ),
}
EQUAL: dict[str, Pair] = {
    "again": Pair(),
    "with 2 workers": Pair(workers=2),
    "with augmentation": Pair(both=("data.noise=0.1",)),
    "2 ranks": Pair(ranks=2),
    "2 ranks, 2 workers": Pair(ranks=2, workers=2),
    "EMA": Pair(both=("callback=[default,ema]",)),
    "resumed after an epoch": Pair(resumes=True),
    "preempted and resumed": Pair(preempted=True),
    "a module renamed": Pair(edit=(CODE, "self.second", "self.head")),
    "tags and a logger": Pair(("tags=[b]", "callback.throughput=null")),
}


@dataclass
class PairProject:
    """A project in a git repository, and the runs of pairs.

    Args:
        scratch: Folder of the project and of its runs.
    """

    scratch: Path
    root: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.log = self.scratch / "project", self.scratch / "log.txt"
        for group, name in (("data", "PairData"), ("task", "PairModule")):
            (self.root / "configs" / group).mkdir(parents=True)
            more = "file: samples.pt\nnum_workers: 0\n" if group == "data" else "lr: 0.01\n"
            (self.root / "configs" / group / "pair.yaml").write_text(f"# Pair.\n_target_: parts.{name}\n{more}")
        (self.root / CODE).write_text(PARTS.read_text())
        (self.root / ".gitignore").write_text("*.pt\n")
        for version, factor in (("1.0", "1.0"), ("2.0", "1.0 + 1e-6")):
            place = self.scratch / f"lib-{version}"
            (place / f"planted_lib-{version}.dist-info").mkdir(parents=True)
            (place / "planted_lib.py").write_text(f"def scale(x):\n    return x * ({factor})\n")
            python = self.scratch / f"python-{version}"
            path = f'export PYTHONPATH="{place}:$PYTHONPATH"'
            python.write_text(f'#!/bin/sh\n{path}\nexec {sys.executable} "$@"\n')
            python.chmod(0o755)
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            self.git(*words)
        program = "import sys; sys.path.insert(0, sys.argv[1]); import parts; "
        program += "parts.write_data('samples.pt'); parts.write_data('changed.pt', int(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", program, str(self.root), str(CHANGED)], cwd=self.root, check=True)

    def git(self, *words: str) -> str:
        """Run git in the project, and return its output."""
        options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *options, *words], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def train(self, folder: Path, pair: Pair, side: int, more: Sequence[str] = ()) -> int:
        """Train a run in a fork, and return the exit status."""
        words = ["data=pair", "task=pair", "model=null", "logger=csv", "report=false", "test=false"]
        words += [f"folder={folder}", f"data.num_workers={pair.workers}", "trainer.accelerator=cpu"]
        words += ["trainer.max_epochs=2", f"data.batch_size={16 // pair.ranks}", "trainer.gradient_clip_val=null"]
        if pair.ranks > 1:
            words += ["trainer=ddp", f"trainer.devices={pair.ranks}", "trainer.strategy.start_method=fork"]
        words += [*pair.both, *(pair.second if side else ()), *more]
        last = {word.partition("=")[0]: word for word in words}
        return forked(self._start, folder, pair, side, [*last.values()])

    def _start(self, folder: Path, pair: Pair, side: int, words: list[str]) -> None:
        import torch

        from boltcutter.training import train

        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.root)
        sys.dont_write_bytecode = True  # that of an edit of equal length is taken for what it is reset to in its second
        torch.set_num_threads(pair.threads[side])
        os.environ.pop("PAIR_SCALE", None)
        if pair.variables[side]:
            os.environ["PAIR_SCALE"] = pair.variables[side]
        if pair.packages[side]:
            sys.path.insert(0, str(self.scratch / f"lib-{pair.packages[side]}"))
        project = Project.find(self.root)
        project.activate()
        train.train_command(project, words)

    def make(self, name: str, pair: Pair, base: Path | None = None) -> tuple[Path, Path]:
        """Train both runs of a pair.

        Args:
            name: Of the pair.
            pair: What differs.
            base: A run of the project without a change, which is the first one if that has no settings of its own.
        """
        short = "".join(letter if letter.isalnum() else "-" for letter in name)
        first, second = (self.scratch / "runs" / f"{short}-{side}" for side in "ab")
        if pair.packages[0]:
            self.edit((CODE, "        x = self.norm(x)\n", "        x = planted_lib.scale(self.norm(x))\n"))
            self.edit((CODE, "import torch\n", "import planted_lib\nimport torch\n"))
            self.git("commit", "-qam", "library")
        if pair.before[0]:
            for side, folder in enumerate((first, second)):
                self.train(folder, pair, side, ["trainer.max_epochs=1", pair.before[side]])
                words = [f"resume={folder}", "trainer.max_epochs=2", "task.lr=0.005"]
                if forked(self._start, folder, pair, side, words):
                    raise RuntimeError(f"{name}: a run failed; see {self.log}")
            return first, second
        plain = Pair(ranks=pair.ranks, workers=pair.workers)
        own = pair.both or pair.packages[0] or pair.ranks > 1 or pair.workers or pair.threads[0] != 1
        if base and not own:
            first = base
        elif self.train(first, pair if own else plain, 0):
            raise RuntimeError(f"{name}: the first run failed; see {self.log}")
        if pair.edit:
            self.edit(pair.edit)
            if pair.commits:
                self.git("commit", "-qam", name)
        try:
            if pair.resumes or pair.preempted:
                stop = ["+callback.stop._target_=parts.Preempted"] if pair.preempted else ["trainer.max_epochs=1"]
                self.train(second, pair, 0, stop)
                status = forked(
                    self._start, second, pair, 1, [f"resume={second}", "trainer.max_epochs=2", *pair.second]
                )
            else:
                status = self.train(second, pair, 1)
        finally:
            self.git("reset", "-q", "--hard", self.first_commit())
        if status:
            raise RuntimeError(f"{name}: the second run failed; see {self.log}")
        return first, second

    def first_commit(self) -> str:
        """The commit without a change."""
        return self.git("rev-list", "--max-parents=0", "HEAD")

    def edit(self, edit: Edit) -> None:
        """Replace a text in a file of the project."""
        file, old, new = edit
        path = self.root / file
        content = path.read_text()
        assert old in content, old
        path.write_text(content.replace(old, new))


def pythons(pair: Pair, project: PairProject) -> list[str | None]:
    """The interpreters of the environments of both runs of a pair."""
    return [f"{project.scratch}/python-{version}" if version else None for version in pair.packages]


def overrides(first: Path, second: Path, pair: Pair, project: PairProject) -> list[str]:
    """The arguments of ``bisect`` for a pair."""
    keys = zip(("python_a", "python_b"), pythons(pair, project), strict=True)
    return [f"run={first}", f"with={second}", *(f"{key}={python}" for key, python in keys if python)]
