import runpy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from boltcutter.scaffold.source_code import SourceFile, resolvers, source_files

TRAIN = """
import math
from functools import partial
from omegaconf import OmegaConf
from .helpers import half as halved

FACTOR = 3


def scaled(value):
    return value * FACTOR


def main(cfg):
    OmegaConf.register_new_resolver("bad", lambda x: x + cfg.name)


OmegaConf.register_new_resolver("len", len)
OmegaConf.register_new_resolver("eval", eval)
OmegaConf.register_new_resolver("scaled", scaled, use_cache=True)
OmegaConf.register_resolver("up", lambda x: math.ceil(x))
OmegaConf.register_new_resolver("half", halved)
"""

LOOP = """from omegaconf import OmegaConf

def register_resolvers():
    for name, function in {"tenfold": lambda x: 10 * x}.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
"""


def test_resolvers_are_extracted_with_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "helpers.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "pkg" / "train.py").write_text(TRAIN)
    (tmp_path / "pkg" / "looped.py").write_text(LOOP)
    text, found = resolvers(tmp_path)
    assert ("pkg/looped.py:3", "the resolvers that it registers") in found
    assert ("pkg/train.py:15", "the resolver bad needs cfg of a function; register it there by hand") in found
    (tmp_path / "made.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        runpy.run_path(str(tmp_path / "made.py"))
        cfg = OmegaConf.create(
            {
                "x": [1, 2],
                "a": "${len:${x}}",
                "b": "${eval:2*3}",
                "c": "${scaled:2}",
                "d": "${up:1.2}",
                "e": "${half:3}",
                "f": "${tenfold:3}",
            }
        )
        assert [cfg[key] for key in "abcdef"] == [2, 6, 6, 2, 1.5, 30]
    finally:
        for name in ("len", "eval", "scaled", "up", "half"):
            OmegaConf.clear_resolver(name)


def test_values_of_expressions(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "from lightning.pytorch.callbacks import EarlyStopping as Stop\nimport torch\n"
        "stop = Stop('val/loss', patience=3)\nx = x\ny = unknown()\n"
    )
    (source,) = source_files(tmp_path, "Stop")
    stop = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "_args_": ["val/loss"], "patience": 3}
    assert source.value(source.assigned["stop"]) == stop
    assert source.path(source.assigned["stop"].func) == stop["_target_"]  # type: ignore[attr-defined]


def test_modules_in_src_have_the_names_under_which_they_are_imported(tmp_path: Path) -> None:
    for name in ("src/a/__init__.py", "src/a/b.py", "src/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("class A:\n    def __init__(self, x=1, *, y=2, z=[]): ...\n")
    assert SourceFile(tmp_path / "src/a/b.py", tmp_path).module == "a.b"
    assert SourceFile(tmp_path / "src/a/__init__.py", tmp_path).module == "a"
    assert SourceFile(tmp_path / "src/c.py", tmp_path).module == "src.c"
    assert SourceFile(tmp_path / "src/a/b.py", tmp_path).defaults("a.b.A") == {"x": 1, "y": 2}
    (tmp_path / "src/__init__.py").write_text("")
    assert SourceFile(tmp_path / "src/a/b.py", tmp_path).module == "src.a.b"
