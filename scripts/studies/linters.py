"""What torchtest2 and guardtower say of the programs of tests/programs: a table of docs/diagnosis.md.

    pip install torchtest2==0.1.0 guardtower==0.1.0        # neither is a dependency of the project
    python scripts/studies/linters.py [torchtest2|guardtower|boltcutter] [<program or file> …]

Each is asked before the first step of the real training, with its module, optimizer and batch. Of these two, any FAIL
counts, whatever it says; of Boltcutter, in a training and by ``audit``, only a certain or likely finding of a check
that tells the cause. A program whose batch is not (inputs, targets) is given as a single input.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import lightning as L
import torch

programs: Any = import_module("programs")
running: Any = import_module("programs.running")

TOOLS = ("torchtest2", "guardtower", "boltcutter")
UNSURE = "overfit_batch"  # a FAIL that says that something is wrong, but not what
SECONDS = 120  # for one program


class Ask(L.Callback):
    """Ask a linter about the first batch, and end the training."""

    def __init__(self, question: Callable[[L.Trainer, L.LightningModule, Any], set[str]]) -> None:
        self.question, self.answer = question, set[str]()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> Any:
        """Ask."""
        with torch.enable_grad():
            self.answer = self.question(trainer, pl_module, batch)
        trainer.should_stop = True
        return -1


def torchtest2(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> set[str]:
    """The names of its checks that fail."""
    make_plugin: Any = import_module("torchtest2.plugins.lightning").LightningPlugin
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, None)
    plugin = make_plugin() if is_pair else make_plugin(lambda inputs, targets: inputs)
    report = import_module("torchtest2").check_model(
        module, inputs, targets, optimizer=trainer.optimizers[0], plugin=plugin
    )
    failed = {each.name for each in report.failures}
    if "forward" in failed:  # after which it skips most checks
        raise RuntimeError("forward cannot be called with the inputs of a batch")
    return failed


def guardtower(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> set[str]:
    """The names of its checks that fail."""
    audit: Any = import_module("guardtower").audit

    def step() -> Any:
        output = module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    inputs = [t for t in batch if isinstance(t, torch.Tensor)] if isinstance(batch, list | tuple) else None
    return {each.check for each in audit(module, step, optimizer=trainer.optimizers[0], inputs=inputs).errors}


def boltcutter(program: Any) -> set[str]:
    """The names of its certain and likely findings, in a training and in an audit."""
    from boltcutter.diagnosis.trial import Trial

    found = set()
    for watch in (None, Trial(with_data=True)):
        with tempfile.TemporaryDirectory() as folder:
            found |= {each.check for each in running.find(program, Path(folder), watch) if each.level != "note"}
    return found


def answer(tool: str, kind: str, name: str) -> set[str] | str:
    """What a tool says of a program; a text if it cannot be asked."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    program = (programs.BUGS if kind == "bug" else programs.CORRECT)[name]
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            if tool == "boltcutter":
                return boltcutter(program)
            L.seed_everything(0, verbose=False)
            module, train, val = program.make()
            ask = Ask({"torchtest2": torchtest2, "guardtower": guardtower}[tool])
            with tempfile.TemporaryDirectory() as folder:
                running.trainer_of(Path(folder), *program.callbacks(), ask, **program.trainer).fit(module, train, val)
            return ask.answer
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def in_time(tool: str, kind: str, name: str) -> set[str] | str:
    """What a tool says of a program in a process of its own, which may hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(answer(tool, kind, name)))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else f"takes more than {SECONDS} s"
    except EOFError:
        return "the process ends"
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Print a row for each tool."""
    tools = [word for word in sys.argv[1:] if word in TOOLS]
    chosen = {word for word in sys.argv[1:] if word not in TOOLS}
    print("| tool | bugs | correct programs with an alarm | not asked |\n|---|---|---|---|")
    for tool in tools or TOOLS:
        counts: Counter[str] = Counter()
        for kind, group in (("bug", programs.BUGS), ("correct", programs.CORRECT)):
            for name, program in group.items():
                if chosen and not chosen & {name, program.make.__module__.rpartition(".")[2]}:
                    continue
                found = in_time(tool, kind, name)
                print(f"  {tool} {kind} {name}: {found}", file=sys.stderr, flush=True)
                counts[kind] += 1
                if isinstance(found, str):
                    counts["not asked"] += 1
                elif kind == "correct":
                    counts["alarms"] += bool(found)
                elif tool == "boltcutter":
                    counts["named"] += bool(found & {*program.expect})
                else:
                    counts["named"] += bool(found - {UNSURE})
                    counts["unsure"] += found == {UNSURE}
        unsure = f", and {counts['unsure']} only by {UNSURE}" if counts["unsure"] else ""
        print(
            f"| {tool} | {counts['named']} of {counts['bug']}{unsure} | {counts['alarms']} of {counts['correct']} | "
            f"{counts['not asked']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
