"""The public API: what `import boltcutter` offers, and the functions that do what the commands do."""

import ast
import importlib
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import run_command

import boltcutter

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
RENEW = "PYTHONPATH=tests python tests/api/test_functions.py > tests/api/public_api.txt"
SHORT = ["model=linear", "logger=null", "callback.progress=null", "report=false", "trainer.max_epochs=1"]


def describe_api() -> Iterator[str]:
    """One line for each name, with its signature, and for each attribute that a class adds to its public base."""
    for name in boltcutter.__all__:
        found = getattr(boltcutter, name)
        if not inspect.isclass(found):
            yield f"function {name}{signature(found)}"
            continue
        yield f"class {name}{signature(found) if has_own_signature(found) else ''}"
        bases = [base for base in found.__mro__[1:] if not is_own(base) or base.__name__ in boltcutter.__all__]
        inherited = {attribute for base in bases for attribute in vars(base)}
        for attribute in sorted({a for base in found.__mro__ if base not in bases for a in vars(base)} - inherited):
            if not attribute.startswith("_"):
                value = getattr(found, attribute)
                yield f"    {attribute}{signature(value) if inspect.isroutine(value) else ''}"


def is_own(found: Any) -> bool:
    return str(getattr(found, "__module__", "")).startswith("boltcutter")


def has_own_signature(found: type) -> bool:
    return is_own(found.__init__) or hasattr(found, "_fields")  # type: ignore[misc]


def signature(found: Any) -> str:
    """Without what depends on the machine and on the version of Python."""
    text = str(inspect.signature(found)).replace(str(ROOT), "").replace("'", "").replace('"', "")
    return re.sub(r"ForwardRef\((.*?)\)", r"\1", text)


def test_the_public_api_equals_its_snapshot() -> None:
    found = "".join(f"{line}\n" for line in describe_api())
    assert found == SNAPSHOT.read_text(), f"the public API has changed; if that is intended: {RENEW}"


def test_each_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert not [name for name in boltcutter.__all__ if f"`{name}" not in text]


def test_type_checkers_read_the_names_that_are_imported() -> None:
    """The imports of the stub are the lazy ones."""
    tree = ast.parse((ROOT / "src" / "boltcutter" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.asname or "" for node in imports for alias in node.names) == boltcutter.__all__
    for node in imports:
        for alias in node.names:
            home = importlib.import_module(node.module or "")
            assert getattr(boltcutter, alias.name) is getattr(home, alias.name)


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys, boltcutter; dir(boltcutter); print({'torch', 'lightning', 'omegaconf', 'numpy'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        boltcutter.Trainer  # noqa: B018


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with the same seed and one with another, trained in this process."""
    place = tmp_path_factory.mktemp("api")
    return [boltcutter.train(*SHORT, f"runs={place}", f"seed={seed}", project=ROOT) for seed in (0, 0, 1)]


def test_train_returns_the_run_folder(runs: list[Path]) -> None:
    assert len(set(runs)) == 3
    for folder in runs:
        record = json.loads((folder / "record.json").read_text())
        assert [attempt["reason"] for attempt in record["attempts"]] == ["completed"]
        assert record["config"]["choices"]["model"] == "linear"


def test_a_run_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert boltcutter.train(*SHORT, f"folder={folder}", "test=false", project=ROOT) == folder
    assert boltcutter.train(f"resume={folder}", "trainer.max_epochs=2", project=ROOT) == folder
    assert len(json.loads((folder / "record.json").read_text())["attempts"]) == 2


def test_evaluate_returns_the_metrics(runs: list[Path]) -> None:
    scores = boltcutter.evaluate(run=runs[0], split="test", project=ROOT)
    assert scores == pytest.approx(json.loads((runs[0] / "record.json").read_text())["test"])
    assert boltcutter.evaluate("data.batch_size=100", run=runs[0], split="val", ckpt="last", project=ROOT).keys() == {
        name.replace("test", "val") for name in scores
    }


def test_predict_returns_columns(runs: list[Path], tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (8, 8), 255).save(tmp_path / "digit.png")
    table = boltcutter.predict(run=runs[0], input=tmp_path, output=tmp_path / "out.csv", project=ROOT)
    assert isinstance(table, dict)
    assert [len(column) for column in table.values()] == [1] * 12  # name, prediction and ten probabilities
    assert list(table)[:2] == ["input", "prediction"]
    assert (tmp_path / "out.csv").is_file()


def test_mistakes_are_config_errors(runs: list[Path], tmp_path: Path) -> None:
    for overrides in (
        ["modle=mlp"],
        ["data.batch_size=0"],
        ["trainer.max_epochs=many"],
        ["--help"],
        ["resume=nowhere"],
    ):
        with pytest.raises(boltcutter.ConfigError, match=overrides[0].partition("=")[0]):
            boltcutter.train(*overrides, f"runs={tmp_path}", project=ROOT)
    with pytest.raises(boltcutter.ConfigError, match=r"split=tset.*test"):
        boltcutter.evaluate(run=runs[0], split="tset", project=ROOT)
    with pytest.raises(boltcutter.ConfigError, match="run=nowhere"):
        boltcutter.predict(run="nowhere", input="x", project=ROOT)
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter]\npackage = 3\n")
    with pytest.raises(boltcutter.ConfigError, match="package"):
        boltcutter.train(project=tmp_path)


def test_an_unused_copy_of_the_library_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "src" / "boltcutter").mkdir(parents=True)
    (tmp_path / "src" / "boltcutter" / "__init__.py").touch()
    with pytest.raises(boltcutter.ConfigError, match=f"PYTHONPATH={tmp_path}/src"):
        boltcutter.train(project=tmp_path)


def process_state() -> list[Any]:
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)]
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    threads = [thread for thread in threading.enumerate() if thread.name == "signals"]
    return [wakeup, handlers, levels, list(warnings.filters), threads, sys.stdout, dict(os.environ)]


@pytest.mark.parametrize("overrides", [[], ["callback=null"], ["+optimizer.nothing=1"], ["optimizer.lr=nan"]])
def test_the_process_is_as_before(overrides: list[str], tmp_path: Path) -> None:
    """Also after a mistake, after training failed, and for callers that wait for signals in an event loop."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writing)
    try:
        before = process_state()
        try:
            boltcutter.train(*SHORT, *overrides, f"runs={tmp_path}", project=ROOT)
        except (boltcutter.ConfigError, RuntimeError):
            assert "=" in overrides[0]
        assert process_state() == before
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGUSR1, previous)
        os.close(reading)
        os.close(writing)


def test_training_in_a_thread(tmp_path: Path) -> None:
    """Python lets only the main thread install signal handlers."""
    with ThreadPoolExecutor(1) as pool:
        folder = pool.submit(boltcutter.train, *SHORT, "test=false", f"runs={tmp_path}", project=ROOT).result()
    assert json.loads((folder / "record.json").read_text())["attempts"][0]["reason"] == "completed"


def send_signal(number: signal.Signals, folder: Path) -> None:
    """Send a signal to this process once it has trained an epoch."""
    end = time.monotonic() + 60
    while not (folder / "checkpoints" / "last.ckpt").is_file() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, boltcutter.PreemptionError)]
)
def test_a_signal_saves_the_run_and_raises(
    number: signal.Signals, expected: type[BaseException], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    before = process_state()
    thread = threading.Thread(target=send_signal, args=(number, folder))
    thread.start()
    with pytest.raises(expected, match="saved"):
        boltcutter.train(*SHORT, "trainer.max_epochs=2000", f"folder={folder}", project=ROOT)
    thread.join()
    assert process_state() == before
    assert (folder / "checkpoints" / "last-preempted.ckpt").is_file()


TWICE = """
import sys, boltcutter
for seed in range(2):
    print(boltcutter.train(*sys.argv[1:], f"seed={seed}"), flush=True)
"""


@pytest.mark.slow
def test_a_process_takes_part_in_one_run_on_several_devices(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    overrides = [*SHORT, "trainer.devices=2", "trainer.accelerator=cpu", f"runs={tmp_path}"]
    done = run_command([sys.executable, str(tmp_path / "twice.py"), *overrides])
    assert done.returncode == 1
    assert len(list(tmp_path.glob("*/*/record.json"))) == 1
    assert "boltcutter.config.errors.ConfigError: train: " in done.stderr


def test_trust_is_granted_for_one_call_only(runs: list[Path], tmp_path: Path) -> None:
    from boltcutter.run import trust

    boltcutter.evaluate("trust=true", run=runs[0], project=ROOT)
    assert not trust.is_granted()


if __name__ == "__main__":
    print("\n".join(describe_api()))
