"""What a project can be made without. Whatever needs a file that goes is found, and goes too: see prune.py."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """Files that go together.

    Args:
        title: What it is, for those who are asked.
        files: Patterns of paths, where * spans folders, too; one that begins with ! keeps what an earlier one took.
        extras: Of pyproject.toml.
        words: Regular expression; sections and sentences of documents in which it is found go as well.
    """

    title: str
    files: tuple[str, ...]
    extras: tuple[str, ...] = ()
    words: str = ""


# What is for the template alone, and never in a project.
TEMPLATE = Room(
    "the template itself",
    (
        "cookiecutter.json",
        "hooks/*",
        "{{cookiecutter*",
        "scripts/project/*",
        *(f"!scripts/project/{kept}" for kept in ("__init__.py", "command.py", "generate.py", "git.py", "update.py")),
        "!scripts/project/parts/*",
        "tests/test_new.py",
        "tests/test_minimal.py",
    ),
)
# The minimal form: files below this folder, and these of the others.
MINIMAL = "minimal/"
KEPT = (
    ".gitignore",
    ".pre-commit-config.yaml",
    "LICENSE",
    "configs/callback/early_stopping.yaml",
    "configs/data/digits.yaml",
    "configs/optimizer/adamw.yaml",
    "constraints.txt",
    "src/boltcutter/callback/__init__.py",
    "src/boltcutter/data/__init__.py",
    "src/boltcutter/logger/__init__.py",
    "src/boltcutter/model/__init__.py",
    "src/boltcutter/py.typed",
    "src/boltcutter/task/__init__.py",
)
ROOMS = {
    "launch": Room("launching on SLURM and other clusters", ("src/boltcutter/launch/*",), words=r"\bSLURM\b"),
    "bench": Room("benchmarks", ("src/boltcutter/bench/*", "docs/benchmarks.md")),
    "language": Room(
        "language models: GPT, texts, tokens",
        (
            "src/boltcutter/model/gpt.py",
            "src/boltcutter/task/language.py",
            "src/boltcutter/data/text.py",
            "src/boltcutter/data/tokens.py",
            "src/boltcutter/data/tokenizer.py",
        ),
        ("text",),
        words=r"\bGPT\b|\btokens=\d",
    ),
    "tabular": Room("tables: CSV and Parquet", ("src/boltcutter/data/tabular.py",)),
    "shards": Room(
        "archives: WebDataset, sharded Parquet and NumPy",
        ("src/boltcutter/data/shards.py", "src/boltcutter/data/archive.py", "src/boltcutter/data/table.py"),
    ),
    "images": Room("MNIST and folders of pictures", ("src/boltcutter/data/mnist.py", "src/boltcutter/data/images.py")),
    "strategies": Room(
        "strategies besides one device and DDP",
        (
            "src/boltcutter/strategy/*",
            "!src/boltcutter/strategy/__init__.py",
            "!src/boltcutter/strategy/ddp.py",
            "configs/trainer/*",
            "!configs/trainer/default.yaml",
            "!configs/trainer/ddp.yaml",
            "!configs/trainer/mpi.yaml",
            "*horovod*",
            "!configs/trainer/mpi.yaml",
            "docs/strategies.md",
        ),
    ),
    "spot_interruption": Room("clouds' notices of preemption", ("src/boltcutter/callback/spot_interruption.py",)),
    "notebook": Room("the notebook", ("docs/notebook.ipynb", "tests/test_notebook.py"), ("notebook",)),
    "faults": Room(
        "tests that kill runs, and the soak",
        ("tests/test_faults.py", "tests/faulty.py", "tests/test_soak.py", "docs/reliability.md"),
    ),
}
