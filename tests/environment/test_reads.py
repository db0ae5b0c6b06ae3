import codecs
import configparser
import copy
import gzip
import mimetypes
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from boltcutter.environment import reads


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PLANTED_SET", "1")
    monkeypatch.delenv("PLANTED_UNSET", raising=False)
    yield
    reads.end()


def noted() -> dict[str, str | None]:
    found = reads.end()
    assert found is not None
    return found.variables


def test_each_way_to_read_a_variable_is_noted_with_its_value() -> None:
    ways = (
        lambda name: os.environ[name],
        lambda name: os.environ.get(name),
        lambda name: os.getenv(name),
        lambda name: name in os.environ,
        lambda name: os.path.expandvars(f"${name}/x"),
        lambda name: os.getenvb(name.encode()),
        lambda name: [os.environ[other] for other in os.environ if other == name],
    )
    for way in ways:
        with reads.observed():
            way("PLANTED_SET")
            assert noted() == {"PLANTED_SET": "1"}
    with reads.observed():
        assert os.environ.get("PLANTED_UNSET", "default") == "default"
        with pytest.raises(KeyError):
            os.environ["PLANTED_UNSET"]
        assert noted() == {"PLANTED_UNSET": None}


def test_copies_and_reads_of_the_standard_library_are_not_noted() -> None:
    with reads.observed():
        assert dict(os.environ) == os.environ.copy() == {**os.environ} == dict(os.environ.items())
        subprocess.run([sys.executable, "-S", "-c", ""], env=os.environ | {"A": "1"}, check=True)
        assert Path.home()
        assert noted() == {}


def test_the_environment_behaves_as_before() -> None:
    before, bound = type(os.environ), os.environ
    with reads.observed():
        assert os.environ is bound
        assert isinstance(os.environ, before)
        assert os.environ.setdefault("PLANTED_UNSET", "2") == "2"
        assert os.environ.pop("PLANTED_UNSET") == "2"
        assert os.environ.pop("PLANTED_UNSET", None) is None
        assert copy.deepcopy(os.environ) == os.environ
        assert pickle.loads(pickle.dumps(dict(os.environ))) == os.environ
        assert sorted(os.environ) == sorted(os.environ.keys())
        assert repr(os.environ).startswith("environ({")
        os.environ["PLANTED_UNSET"] = "3"
        child = subprocess.run(["printenv", "PLANTED_UNSET"], capture_output=True, text=True, check=True)
        assert child.stdout == "3\n"
        del os.environ["PLANTED_UNSET"]
        with pytest.raises(TypeError):
            os.environ[1]  # type: ignore[index]
    assert type(os.environ) is before
    assert type(os.environb) is before
    assert reads.current() is None


def test_each_way_to_read_a_file_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    with gzip.open(file, "wt") as packed:
        packed.write("1")
    (tmp_path / "data.ini").write_text("[a]")
    ways: tuple[Callable[[Path], Any], ...] = (
        lambda path: path.read_bytes(),
        lambda path: path.open().close(),
        lambda path: open(path).close(),
        lambda path: os.close(os.open(path, os.O_RDONLY)),
        lambda path: gzip.open(path).close(),
        lambda path: codecs.open(str(path)).close(),
        lambda path: zipfile.is_zipfile(path),
        lambda path: configparser.ConfigParser().read(path.with_suffix(".ini")),
    )
    for way in ways:
        with reads.observed():
            way(file)
            file.with_suffix(".txt").write_text("2")
            found = reads.end()
        assert found is not None
        assert [Path(name).stem for name in found.files] == ["data"]
    file.read_bytes()
    assert len(found.files) == 1, "nothing is noted afterwards"


def test_files_that_the_standard_library_needs_are_not_noted() -> None:
    with reads.observed():
        assert metadata.version("pytest")
        mimetypes.init()
        found = reads.end()
    assert found is not None
    assert not found.files


def test_only_rank_zero_notes_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with reads.observed():
        assert reads.current() is None


def test_once_training_has_started_only_variables_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("")
    with reads.observed():
        found = reads.current()
        assert found is not None
        found.notes_files = False
        file.read_text()
        assert os.getenv("PLANTED_SET") == "1"
        assert not found.files
        assert noted() == {"PLANTED_SET": "1"}
