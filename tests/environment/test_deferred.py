"""Importing Lightning imports neither transformers nor scipy.signal, which metrics and all others still get."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require


def python(code: str, folder: Path) -> str:
    """The output of code that imports modules of the folder, which is the working directory, before all others."""
    command = [sys.executable, "-c", f"import sys, boltcutter; {code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SCORE = """
from torchmetrics.text import BERTScore
assert "transformers" not in sys.modules
from transformers import BertConfig, BertModel, BertTokenizer
BertTokenizer("vocab.txt").save_pretrained(".")
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
BertModel(BertConfig(vocab_size=7, **sizes)).save_pretrained(".")
metric = BERTScore(model_name_or_path=".", num_layers=1)
metric.update(["a b", "a"], ["a b", "b"])
print(*map(float, metric.compute()["f1"]))
"""


@pytest.mark.slow
def test_a_metric_that_needs_transformers_imports_it(tmp_path: Path) -> None:
    require(package="transformers", install="pip install transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    same, other = map(float, python(SCORE, folder=tmp_path).splitlines()[-1].split())
    assert same == pytest.approx(1, abs=1e-3)
    assert other < 0.999


def write(folder: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_only_torchmetrics_is_given_classes_that_are_imported_later(tmp_path: Path) -> None:
    packages = {
        "transformers/__init__": "print('imported')\nclass Model:\n    name = 'real'\nclass Other(Model): ...\n"
    }
    packages |= {"transformers/sub": "from transformers import Model\n"}
    packages |= {"torchmetrics/__init__": "import torchmetrics.text, helper\n"}
    packages |= {"torchmetrics/text": "from transformers import Model\nprint('deferred')\n"}
    helper = "import {0}\nclass Mine(transformers.Model): ...\nprint(Mine.name)\n"
    for imported in ("transformers", "transformers.sub"):
        folder = write(tmp_path / imported, packages | {"helper": helper.format(imported)})
        used = "import torchmetrics, transformers; print(torchmetrics.text.Model.name, transformers.Other.name)"
        assert python(used, folder).split() == ["deferred", "imported", "real", "real", "real"]


def test_without_transformers_nothing_stands_for_it(tmp_path: Path) -> None:
    found = "import importlib.util, sys\nprint('transformers' in sys.modules)\n"
    folder = write(tmp_path, {"torchmetrics/__init__": found})
    without = "from importlib.machinery import PathFinder; find = PathFinder.find_spec; "
    without += "PathFinder.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest); "
    assert python(f"{without} import torchmetrics", folder) == "False"


@pytest.mark.slow
def test_scipy_signal_is_imported_by_who_needs_it(tmp_path: Path) -> None:
    used = "import torchmetrics; print('scipy.signal' in sys.modules); from scipy import signal; "
    assert python(f"{used} print(*signal.convolve([1, 2], [1, 1]))", tmp_path).split() == ["False", "1", "3", "2"]
    helper = "from scipy.signal import convolve\nimport scipy.signal.windows\nprint(*convolve([1, 2], [1, 1]))\n"
    folder = write(tmp_path / "other", {"torchmetrics/__init__": "import helper\n", "helper": helper})
    assert python("import torchmetrics, scipy.signal; print(scipy.signal.windows.hann(1)[0])", folder).split() == [
        *("1", "3", "2"),
        "1.0",
    ]
