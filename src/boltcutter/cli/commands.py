"""The commands of ``boltcutter <command>`` and of the scripts in a project's ``scripts/``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from boltcutter.cli import main as cli
from boltcutter.cli.translate import COMMANDS as THEIRS
from boltcutter.cli.translate import translate
from boltcutter.config.errors import hint
from boltcutter.environment.output import ignore_lost_readers
from boltcutter.project import Project

NEW = "boltcutter new <name> [folder=.] [author=<name>] [license=MIT] [vendor=false] [template=<URL or folder>]"
ADD = "boltcutter add model|data|task|callback|launch|experiment <name> [--kind regression|sequence|text|image]"
VENDOR = "boltcutter vendor [<component, such as callback.guard>] [--undo]"
DOCTOR_FLAGS = {
    "--test": "train on all devices of this machine, and show what works",
    "--json": "print the result of --test as JSON",
}
CHECK_FLAGS = {"--batch": "also train, validate and test one batch"}
IMPORT = "boltcutter import <folder> [--from lht|cli]"
OVERRIDES = "[group=option …] [key=value …] [+key=value] [~key]"


@dataclass(frozen=True)
class Command:
    """One command; all that it needs is imported only when it is run.

    Args:
        target: Module and function, as ``package.module:function``, which takes the project and the arguments.
        usage: First part of ``--help``; its first line is the summary.
        flags: Module and name of the flags that the function handles itself, with their help texts.
        begin: Module and function to be called before heavy imports.
        is_plain: Whether the function parses all arguments itself, as it takes no configuration.
    """

    target: str
    usage: str
    flags: str | None = None
    begin: str | None = None
    is_plain: bool = False


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "boltcutter.training.train:main",
        f"""Train a model: boltcutter train {OVERRIDES}

boltcutter train model=mlp trainer.max_epochs=5
boltcutter train data=mnist trainer=ddp trainer.devices=8
boltcutter train callback=[default,ema] optimizer=sgd optimizer.lr=0.05
boltcutter train resume=runs/…
boltcutter train reproduce=runs/…""",
        begin="boltcutter.environment.startup:begin",
    ),
    "evaluate": Command(
        "boltcutter.evaluation.evaluate:main",
        "Evaluate a run: boltcutter evaluate run=<folder> [ckpt=best|last|path] [split=test] [data=…] [key=value …]",
    ),
    "predict": Command(
        "boltcutter.evaluation.predict:main",
        "Predict from files: boltcutter predict run=<folder> input=<files> [ckpt=best|last|path] [output=<file>]",
    ),
    "export": Command(
        "boltcutter.export.command:main",
        """Export a model: boltcutter export run=<folder> export=<formats> [ckpt=best|last|path] [key=value …]

boltcutter export run=runs/… export=onnx
boltcutter export run=runs/… export=[torch,int8,int4] export.max_drop=1    # several, which may lose one point""",
    ),
    "serve": Command(
        "boltcutter.serving.server:main",
        """Serve predictions over HTTP: boltcutter serve run=<folder> [ckpt=best|last|path] [export=format or file]

boltcutter serve run=runs/… port=8000 workers=2
boltcutter serve run=runs/… host=0.0.0.0 token_file=token      # reachable from other machines""",
        begin="boltcutter.serving.batching:begin",
    ),
    "check": Command(
        "boltcutter.training.check:main",
        """Check a configuration without training: boltcutter check [--batch] [run=<folder>] [overrides of train]

boltcutter check model=mlp trainer.max_epochs=5     # prints ok, or each mistake on a line
boltcutter check --batch model=mlp                  # also trains, validates and tests one batch""",
        flags="boltcutter.cli.commands:CHECK_FLAGS",
    ),
    "doctor": Command(
        "boltcutter.planning.doctor:main",
        """Show what works on this machine, and estimate memory: boltcutter doctor [run=<folder>] [overrides of train]

boltcutter doctor model=gpt data=text task=language devices=8 memory=80GiB    # which strategy to choose
boltcutter doctor --test""",
        flags="boltcutter.cli.commands:DOCTOR_FLAGS",
    ),
    "launch": Command(
        "boltcutter.launch.command:main",
        """Train in the background, on a cluster or in a cloud: boltcutter launch launch=<option> [overrides of train]

boltcutter launch launch=slurm trainer.num_nodes=2 trainer.devices=8 launch.time=2:00:00
boltcutter launch launch=slurm launch.array='seed=1,2,3;optimizer.lr=0.1,0.01'
boltcutter launch launch=slurm resume=runs/…
boltcutter launch status|logs|cancel run=runs/…
boltcutter launch list""",
        flags="boltcutter.launch.command:FLAGS",
    ),
    "search": Command(
        "boltcutter.search.command:main",
        """Search hyperparameters, or repeat over seeds and folds: boltcutter search search=… [overrides of train]

boltcutter search search=optuna search.space.optimizer.lr='loguniform(1e-4, 1e-1)'
boltcutter search search=asha experiment=mnist search.num_trials=50
boltcutter search search=kfold search.folds=10
boltcutter search resume=runs/…""",
        flags="boltcutter.search.command:FLAGS",
    ),
    "compare": Command(
        "boltcutter.run.compare:main",
        "Compare two runs, bit by bit: boltcutter compare run=<folder> with=<folder> [ckpt=last|best|<name>]",
    ),
    "sync": Command(
        "boltcutter.logger.sync:main",
        "Upload runs that were logged offline to W&B: boltcutter sync run=<folder> [run=<folder> …]",
    ),
    "find-batch-size": Command(
        "boltcutter.planning.batch_size:main",
        "Find the largest batch that fits into memory: boltcutter find-batch-size [overrides of train]",
    ),
    "new": Command("boltcutter.scaffold.new:main", f"Create a project: {NEW}", is_plain=True),
    "add": Command("boltcutter.scaffold.add:main", f"Add a component to the project: {ADD}", is_plain=True),
    "import": Command(
        "boltcutter.scaffold.port:main",
        f"Import a project of lightning-hydra-template or Lightning CLI: {IMPORT}",
        is_plain=True,
    ),
    "vendor": Command(
        "boltcutter.scaffold.vendor:main",
        f"Copy the library, or one component, into the project: {VENDOR}",
        is_plain=True,
    ),
}


def script(name: str, file: str) -> None:
    """Run a command from a script of a project.

    Args:
        name: Name of the command.
        file: Path of the script, in the project's folder.
    """
    run(name, sys.argv[1:], file, program=f"python {shlex.quote(sys.argv[0])}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``boltcutter <command>`` in the project of the working directory."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("--help", "-h"):
        print("Usage: boltcutter <command> [--help] …\n")
        print("\n".join(f"  {command:18}{_summary(command)}" for command in COMMANDS))
        return
    if name == "--complete":  # called by the shell completion, see cli
        found = [command for command in COMMANDS if command.startswith(rest[0] if rest else "")]
        print("".join(f"{command}\t{_summary(command)}\n" for command in found), end="")
        return
    if name not in COMMANDS:
        near = f"; use {THEIRS[name]}" if name in THEIRS else hint(name, COMMANDS)
        print(f"error: {name}: no such command{near} (there are: {', '.join(COMMANDS)})", file=sys.stderr)
        sys.exit(2)
    run(name, rest)


def run(name: str, arguments: Sequence[str], start: str | None = None, *, program: str | None = None) -> None:
    """Run a command.

    Args:
        name: Name of the command.
        arguments: Arguments after the name of the command.
        start: A file or folder of the project; by default the working directory.
        program: How the command was called, for ``--help``; by default ``boltcutter <name>``.
    """
    arguments = list(arguments)
    ignore_lost_readers()
    if name == "check" and arguments[:1] == ["doctor"]:
        name, arguments = "doctor", arguments[1:]
    command = COMMANDS[name]
    with cli.one_line_errors():
        project = Project.find(start)
    project.use_vendored_library()
    if command.is_plain:
        if {"--help", "-h"} & set(arguments):
            print(command.usage)
            return
        with cli.one_line_errors():
            _load(command.target)(project, arguments)
        return
    with cli.one_line_errors():
        started, (name, arguments) = name, translate(project, name, arguments)
    if name != started:  # a multirun: as if the search had been started
        command, program = COMMANDS[name], None
        sys.argv[1:] = [*([] if sys.argv[0].endswith(f"{started}.py") else [name]), *arguments]
    usage = command.usage.replace(f"boltcutter {name}", program) if program else command.usage
    flags = _load(command.flags) if command.flags else {}
    begin = _load(command.begin) if command.begin else lambda: None
    cli.main(project, command.target.partition(":")[0], usage, arguments, begin=begin, own=flags)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _summary(name: str) -> str:
    return COMMANDS[name].usage.partition(": boltcutter")[0]
