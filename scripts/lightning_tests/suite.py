"""Run Lightning's tests plain and with what a training adds, and compare the outcomes with the known differences."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import yaml

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/Lightning-AI/pytorch-lightning"
TESTS, LEGACY = Path("tests/tests_pytorch"), Path("tests/legacy")
GROUPS = (
    "trainer", "loops", "callbacks", "checkpointing", "core", "models", "tuner", "utilities", "overrides",
    "accelerators", "profilers", "plugins", "strategies", "loggers",
)  # fmt: skip
OPTIONS = {"workers": "2", "tag": "", "results": "runs/lightning", "record": "false", "select": "", "timeout": "120"}
# They need a compiler, or another torch.
LEFT_OUT = ("models/test_onnx.py", "models/test_torch_tensorrt.py")
# How tests are run, one after the other, and the outcome of those that are also run in the next way.
MODES = {"treated": "failed", "plain": "passed", "quiet": "failed"}
NOT_COLLECTED = re.compile(r"^ERROR (\S+\.py)(?: - .*)?$", re.M)  # the last lines of pytest
Outcomes = dict[str, str]  # passed, skipped or failed, by test


def main(usage: str | None, arguments: list[str]) -> int:
    """Run the suite; return 1 if a test passes plain only, without a known reason."""
    if {"-h", "--help"} & {*arguments}:
        print(usage)
        return 0
    options = OPTIONS | dict(part.split("=", 1) for part in arguments if part.partition("=")[0] in OPTIONS)
    places = [part for part in arguments if part.partition("=")[0] not in OPTIONS]
    checkout = Path(places.pop(0)) if places and (Path(places[0]) / TESTS).is_dir() else clone(options["tag"])
    results = Path(options["results"]).resolve()
    results.mkdir(parents=True, exist_ok=True)
    places, workers = places or list(GROUPS), options["workers"]
    more = ["-n", workers, f"--timeout={options['timeout']}", "-k", options["select"]]
    found: dict[str, Outcomes] = {}
    for name in MODES:
        found[name] = run(checkout, places, results / name, more, mode=name) if places else {}
        print(f"{name}: {len(found[name])} tests, {dict(Counter(found[name].values()))}", flush=True)
        chosen = [test for test, outcome in found[name].items() if outcome == MODES[name]]
        places = [test.removeprefix(f"{TESTS.name}/") for test in chosen]
    known = yaml.safe_load((HERE / "differences.yaml").read_text())
    record = options["record"] == "true"
    unread = sorted(set(NOT_COLLECTED.findall((results / "treated.log").read_text())))
    for file in unread:
        print(f"its tests did not run, see treated.log: {file}")
    return report(found["plain"], found["treated"], known, quiet=found["quiet"], record=record) or int(bool(unread))


def clone(tag: str) -> Path:
    """Clone the tests of the installed version of Lightning.

    Raises:
        SystemExit: git is missing or cannot reach the repository, or there is no such tag.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightning-"))
    tag = tag or version("lightning")
    command = ["git", "clone", "-q", "--depth", "1", "--branch", tag, REPOSITORY, str(folder)]
    try:
        subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        folder.rmdir()
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise SystemExit(
            f"error: tag={tag}: cannot clone {REPOSITORY} ({reason}); give the folder of a checkout, or another tag"
        ) from None
    return folder


def run(checkout: Path, places: list[str], results: Path, more: list[str], *, mode: str) -> Outcomes:
    """Run tests in a copy of the checkout, as Lightning's fixtures refuse files beside them; return their outcomes.

    Args:
        checkout: Folder of Lightning's repository.
        places: Files, folders or tests.
        results: Path of the log and the outcomes, without suffix.
        more: Options of pytest.
        mode: ``plain``, ``treated``, or ``quiet``: without what a user sees of the default configuration.
    """
    outcomes = results.with_suffix(".jsonl")
    outcomes.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copytree(checkout / TESTS, copy / TESTS)
        if (legacy := checkout / LEGACY).is_dir():
            shutil.copytree(legacy, copy / LEGACY)
        shutil.copy(checkout / "pyproject.toml", copy)
        (copy / "tmp").mkdir()
        ignored = [f"--ignore=tests_pytorch/{path}" for path in LEFT_OUT]
        (copy / "places.txt").write_text("".join(f"tests_pytorch/{place}\n" for place in places))
        command = [
            sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "lightning_tests.plugin",
            "-p", "no:cacheprovider", "--disable-warnings", "--tb=short", "--max-worker-restart=50",
            *more, *ignored, f"@{copy}/places.txt",
        ]  # fmt: skip
        paths = [str(HERE.parent), str(copy / "tests"), os.environ.get("PYTHONPATH", "")]
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(copy / "tmp")}
        settings |= {"LIGHTNING_TESTS_RESULTS": str(outcomes), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        if mode != "plain":
            settings["LIGHTNING_TESTS_RUNS"] = str(copy / "tmp" / "runs")
        if mode == "quiet":
            settings["LIGHTNING_TESTS_QUIET"] = "1"
        with results.with_suffix(".log").open("w") as log:
            environment = os.environ | settings
            subprocess.run(command, cwd=copy / "tests", env=environment, stdout=log, stderr=log, check=False)
    rows = map(json.loads, outcomes.read_text().splitlines()) if outcomes.exists() else ()
    return {str(row["test"]).removeprefix("tests/"): str(row["outcome"]) for row in rows}


def report(
    plain: Outcomes, treated: Outcomes, known: dict[str, list[str]], *, quiet: Outcomes | None = None, record: bool
) -> int:
    """Print unexpected differences; known ones are lists of tests by their reason.

    A test is named by its file and function, with or without parameters. One that passes in ``quiet`` needs no reason:
    it counts, names or reads callbacks, loggers, checkpoints or the bar of the default configuration.
    """
    reasons = {test: reason for reason, tests in known.items() for test in tests}
    worse = [test for test, outcome in treated.items() if outcome == "failed" and plain.get(test) == "passed"]
    seen = [test for test in worse if (quiet or {}).get(test) == "passed"]
    unknown = [t for t in worse if t not in seen and t not in reasons and t.partition("[")[0] not in reasons]
    found = {test for each in worse for test in (each, each.partition("[")[0])}
    ran = {test for each in treated for test in (each, each.partition("[")[0])}
    gone = [test for test in reasons if test in ran and test not in found]
    print(
        f"{len(worse)} pass plain only: {len(seen)} by what a user sees of the default configuration, "
        f"{len(worse) - len(seen) - len(unknown)} for another known reason"
    )
    for test in unknown:
        print(f"{'    - ' if record else 'passes plain only: '}{test}")
    for test in gone:
        print(f"passes now, remove it from differences.yaml: {test}")
    if not treated:
        print("no test ran; see the log")
    return int(bool(unknown or not treated))
