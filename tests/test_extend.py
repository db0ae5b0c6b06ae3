"""Parts of other distributions: a small one is installed, and everything that it adds is used."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT

from boltcutter.extend import Part

ACME = ROOT / "tests" / "acme"
PAGE = ROOT / "docs" / "extending.md"
Boltcutter = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for packages in which the distribution is installed."""
    place = tmp_path_factory.mktemp("acme")
    shutil.copytree(ACME, place / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", place / "site", place / "source"], check=True, timeout=120)
    return place / "site"


@pytest.fixture
def boltcutter(site: Path, tmp_path: Path) -> Boltcutter:
    """Run ``boltcutter`` in a project, with the distribution installed."""
    (tmp_path / "configs").mkdir()

    def run(*arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "boltcutter", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{site}", "WANDB_MODE": "disabled"},
            text=True,
            capture_output=True,
            timeout=150,
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "bits.txt").write_text("\n".join(f"{number:08b}" for number in range(256)))
    return "data.file=bits.txt"


@pytest.mark.slow
def test_a_distribution_adds_a_command_options_a_callback_and_a_section(
    boltcutter: Boltcutter, data: str, tmp_path: Path
) -> None:
    assert "  slowest           Show the slowest steps of a run\n" in boltcutter("--help").stdout
    options = boltcutter("train", "--help").stdout
    assert "  nice              This machine, with a lower priority. (of acme)\n" in options
    boltcutter("train", "data=parity", data, "model=mlp", "trainer.max_epochs=1", "logger=null", "folder=run")
    slowest = boltcutter("slowest", "run=run", "count=2").stdout.splitlines()
    assert len(slowest) == 2
    assert slowest[0].startswith("step ")
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<a href="#slowest-steps">Slowest steps</a>' in page
    assert f"<th>{slowest[0].split()[1].rstrip(':')}</th>" in page
    error = boltcutter("slowest", "run=other", ok=False)
    assert error.stderr.startswith("error: run=other: ")
    assert boltcutter("evaluate", "run=run", "split=val").stdout


@pytest.mark.slow
def test_a_launcher_of_a_distribution_starts_a_run(boltcutter: Boltcutter, data: str, tmp_path: Path) -> None:
    run = ["data=parity", data, "model=mlp", "trainer.max_epochs=1", "logger=null", "report=false", "folder=run"]
    assert "nice -n 5 " in boltcutter("launch", "launch=nice", "launch.priority=5", *run, "--dry-run").stdout
    failed = boltcutter("launch", "launch=nice", "launch.priority=high", *run, ok=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: launch.priority=high")
    boltcutter("launch", "launch=nice", *run, "--wait")
    (attempt,) = json.loads((tmp_path / "run" / "record.json").read_text())["attempts"]
    assert attempt["reason"] == "completed"


def declare(site: Path, name: str, path: str) -> None:
    """Install a distribution of nothing but an entry point."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[boltcutter.parts]\n{name} = {path}\n")


def test_the_parts_of_an_older_installation_are_left_out(tmp_path: Path) -> None:
    declare(tmp_path / "packages", "boltcutter", "boltcutter.launch.part:PART")
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'packages'}"}
    command = [sys.executable, "-c", "from boltcutter.extend import parts; print(len(parts()))"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == ["0"]


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("broken.part:PART", "", "error: broken: broken.part:PART cannot be imported (No module named 'broken')"),
        ("broken:PART", "PART = 3", "error: broken: broken:PART is no boltcutter.extend.Part"),
        (
            "broken:PART",
            "from boltcutter.extend import *\nPART = Part('broken', {'launch': Command('a:b', 'c')})",
            "error: launch: a command of the library, and of an installed part",
        ),
        (
            "broken:PART",
            "from boltcutter.extend import *\nPART = Part('broken', {'train': Command('a:b', 'c')})",
            "error: train: a command of the library",
        ),
    ],
)
def test_a_part_that_cannot_be_used_is_named(path: str, code: str, message: str, tmp_path: Path) -> None:
    declare(tmp_path / "packages", "broken", path)
    if code:
        (tmp_path / "packages" / "broken.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'packages'}"}
    command = [sys.executable, "-m", "boltcutter", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def page(text: str) -> str:
    """The page about parts with the files of the distribution, and the fields of ``Part``, as they are now.

    A block is that of a file if it begins with its path in a comment.
    """
    for file in (file for file in ACME.rglob("*.*") if file.suffix in (".py", ".yaml", ".toml")):
        head = f"# {file.relative_to(ACME)}\n"
        replace = re.compile(rf"^(```\w+\n{re.escape(head)}).*?^```$", re.M | re.S)
        text = replace.sub(lambda block, file=file: f"{block[1]}{file.read_text().strip()}\n```", text)  # type: ignore[misc]
    described = inspect.cleandoc(str(Part.__doc__)).partition("Args:\n")[2].replace("``", "`")
    fields_of_part = re.findall(r"^    (\w+): (.*?)\.?$(?=\n    \w|\Z)", described.rstrip(), re.M | re.S)
    rows = [f"| `{name}` | {' '.join(meaning.split())} |" for name, meaning in fields_of_part]
    return re.sub(
        r"(?<=^\| field of `Part` \| is \|\n\|---\|---\|\n)(?:\|.*\n)*", "\n".join([*rows, ""]), text, flags=re.M
    )


def test_the_page_is_made_from_the_distribution_and_the_fields_of_a_part() -> None:
    text = PAGE.read_text()
    assert page(text) == text, f"PYTHONPATH=tests python {Path(__file__).relative_to(ROOT)} writes it"
    assert re.findall(r"^\| `(\w+)` \| .+ \|$", text, re.M) == [field.name for field in fields(Part)]
    assert len(fields(Part)) <= 7
    shown = set(re.findall(r"^# ((?:acme/|pyproject)\S+)$", text, re.M))
    files = {str(f.relative_to(ACME)) for f in ACME.rglob("*.*") if f.suffix in (".py", ".yaml", ".toml")}
    assert files - shown == {"acme/__init__.py"}


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
