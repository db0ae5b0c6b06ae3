import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.environment import reads
from boltcutter.run import inputs

CANARY = "canary-5f2a9c81d7e3"


def described(folder: Path, variables: dict[str, str | None], *files: Path) -> dict[str, Any]:
    found = reads.Reads()
    found.variables, found.files = variables, {str(file): None for file in files}
    return inputs.describe_inputs(found, folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MY_TOKEN", CANARY),
        ("SERVICE_PASSWORD", CANARY),
        ("DATABASE_URL", f"postgres://me:{CANARY}@host/x"),
        ("PLACE", f"https://me:{CANARY}@host/x"),
        ("ANY", f"hf_{'a' * 30}{CANARY.replace('-', '')}"),
        ("OPTIONS", f"https://host/?token={CANARY}"),
    ],
)
def test_no_secret_is_recorded(tmp_path: Path, name: str, value: str) -> None:
    found = described(tmp_path, {name: value, "SCALE": "2"})["environment"]["variables"]
    assert "canary" not in str(found)
    assert [*found] == ["SCALE", name] if name > "SCALE" else [name, "SCALE"]
    assert found["SCALE"] == "2"


def test_neither_secret_files_nor_those_of_the_run_are_recorded(tmp_path: Path) -> None:
    files = [tmp_path / name for name in (".env", "id_rsa", "run/config.yaml", "data.csv")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(CANARY)
    found = described(tmp_path / "run", {}, *files, tmp_path / "gone.csv")["files"]["each"]
    assert [os.path.basename(name) for name in found if str(tmp_path) in name] == ["data.csv"]


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = tmp_path / "data.csv", tmp_path / "moved" / "data.csv"
    other.parent.mkdir()
    for file in (data, other):
        file.write_text("1,2,3")
    monkeypatch.setenv("PYTHONPATH", "/a")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first = described(tmp_path / "run", {"SCALE": "1", "FLAG": None, "SAME": "1", "KEY": "x"}, data)
    monkeypatch.setenv("PYTHONPATH", "/b")
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    second = described(tmp_path / "run", {"SCALE": "2", "FLAG": "1", "SAME": "1", "OTHER": "0"}, other)
    found = {name: values for _, name, *values in inputs.input_differences(first, second)}
    assert found == {
        "FLAG": ["unset", "'1'"],
        "KEY": ["'***'", "not read"],
        "OTHER": ["not read", "'0'"],
        "PYTHONHASHSEED": ["unset", "'1'"],
        "SCALE": ["'1'", "'2'"],
        "PYTHONPATH": ["/a", "/b"],
    }, "an equal file is elsewhere"
    monkeypatch.delenv("PYTHONHASHSEED")
    other.write_text("1,2,4")
    second = described(tmp_path / "run", {"SCALE": "1"}, other)
    assert [kind for kind, *_ in inputs.input_differences(first | {"environment": {}}, second)] == ["file"]
    other.write_text("1,2,4,5")
    second = described(tmp_path / "run", {"SCALE": "1"}, other)
    (line,) = inputs.changed_inputs({"files": first["files"]}, second)
    assert "5 bytes" in line
    assert "7 bytes" in line
    assert not [*inputs.input_differences({}, second)], "the record of an earlier version has none"
    assert not [*inputs.input_differences(first, first)]


def test_many_files_are_compared_by_names_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_FILES", 2)
    files = [tmp_path / f"{number}.bin" for number in range(5)]
    for file in files:
        file.write_bytes(b"x")
    first = described(tmp_path / "run", {}, *files)
    assert len(first["files"]["each"]) == 2
    files[4].write_bytes(b"xy")
    second = described(tmp_path / "run", {}, *files)
    assert [name for _, name, *_ in inputs.input_differences(first, second)] == ["all"]


def test_files_in_a_record_of_somebody_else_are_compared_in_little_time() -> None:
    many = {f"/a/{number}/f{number}": {"size": number, "content": "x"} for number in range(20_000)}
    moved = {name.replace("/a/", "/b/"): facts for name, facts in many.items()}
    begin = time.process_time()
    assert not [*inputs.input_differences({"files": {"each": many}}, {"files": {"each": moved}})]
    assert time.process_time() - begin < 5
    for odd in ({"a": 3}, {"a": {"size": "x"}}, {"a": {"size": None}}, [1], None):
        assert [*inputs.input_differences({"files": {"each": odd}}, {"files": {"each": {}}})] == []


def test_modules_outside_of_the_repository_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside_module.py"
    (project / ".git").mkdir(parents=True)
    inside = project / "inside_module.py"
    for file in (inside, outside):
        file.write_text("")
        monkeypatch.setitem(sys.modules, file.stem, module := types.ModuleType(file.stem))
        module.__file__ = str(file)
    monkeypatch.chdir(project)
    monkeypatch.setattr(inputs, "MAX_FILES", 10_000)  # of the tests of this process
    each = described(tmp_path / "run", {})["files"]["each"]
    named = [os.path.basename(name) for name in each]
    assert "outside_module.py" in named
    assert "inside_module.py" not in named
    assert not {pytest.__file__, torch.nn.functional.__file__} & {*each}, "of installed packages"
