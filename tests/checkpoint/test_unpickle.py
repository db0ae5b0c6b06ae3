import argparse
import copy
import enum
import functools
import io
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from boltcutter.checkpoint import unpickle
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.load import find_damage, find_objects, load_checkpoint, read_metadata
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.checkpoint.unpickle import Placeholder, find_placeholders
from boltcutter.environment import user_key
from boltcutter.environment.this_process import this_process


class Colour(enum.Enum):
    RED = 1


class Settings(dict[str, Any]):
    pass


class Names(list[str]):
    pass


class Stateful:
    """Would touch a file if anything of it were called."""

    touched = Path()

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        Path("touched").touch()


def shout(x: Any) -> Any:
    Path("touched").touch()
    return x


class Called:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


FOREIGN = {
    "module": nn.Linear(2, 2),
    "class": nn.Linear,
    "function": shout,
    "partial": functools.partial(shout, x=1),
    "enum": Colour.RED,
    "frame": pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}),
    "series": pd.Series(pd.date_range("2020", periods=2)),
    "objects": np.array([shout, None], dtype=object),
    "record": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "date": np.datetime64("2020-01-01"),
    "dict": Settings(a=1),
    "list": Names("ab"),
    "namespace": argparse.Namespace(a=1),
    "simple": SimpleNamespace(a=1),
    "stateful": Stateful(),
    "called": Called(shout, 1),
    "generator": np.random.default_rng(0),
    "bound": Stateful().__setstate__,
    "made of another": Called(type(Path()), shout),
    "device_map": {"inner": [nn.ReLU()]},
}
SHARED = np.arange(4)
PLAIN = {
    "path": Path("/a/b"),
    "scalar": np.float64(0.5),
    "flag": np.bool_(True),
    "array": np.arange(6.0, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big": np.arange(3, dtype=">i4"),
    "empty": np.zeros((0, 3)),
    "text": np.array(["ab", "c"]),
    "shared": [SHARED, SHARED],
    "set": {1, 2},
    "frozen": frozenset({1}),
    "counter": Counter("aab"),
    "default": defaultdict(list, a=[1]),
    "queue": deque([1, 2], maxlen=3),
    "range": range(3),
    "slice": slice(1, None),
    "bytes": [b"", b"ab", bytearray(b"c")],
    "complex": 1 + 2j,
    "long": 2**200,
    "times": (datetime(2020, 1, 1), timedelta(seconds=1)),
    "fraction": Fraction(1, 3),
    "negative fraction": Fraction(-(10**40), 7),
    "decimal": Decimal("1.50"),
    "windows": PureWindowsPath("C:/a"),
    "types": [bool, dict, float, int, list, str, tuple],
    "dtype": torch.float16,
    "size": torch.Size([1, 2]),
}
TENSORS = {"state_dict": OrderedDict(w=torch.arange(6.0).view(2, 3), p=nn.Parameter(torch.ones(2)))}
pytestmark = pytest.mark.filterwarnings("ignore:.*pickle protocol")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "some.ckpt"


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_are_loaded_and_objects_become_placeholders(path: Path, protocol: int) -> None:
    content = TENSORS | {"hyper_parameters": FOREIGN | PLAIN, "loops": {"step": 3}}
    torch.save(content, path, pickle_protocol=protocol)
    for found in (load_checkpoint(path), load_checkpoint(path, lazy=True)):
        assert torch.equal(found["state_dict"]["w"], TENSORS["state_dict"]["w"])
        assert isinstance(found["state_dict"]["p"], nn.Parameter)
        assert list(found["state_dict"]) == ["w", "p"]
        given = found["hyper_parameters"]
        for name, value in PLAIN.items():
            assert repr(given[name]) == repr(value), name
            assert type(given[name]) is type(value)
        for name in FOREIGN:
            assert list(find_placeholders(given[name], name)), name
        assert given["columns"].flags.f_contiguous
        assert given["shared"][0] is given["shared"][1]
        given["default"]["new"].append(1)
    assert read_metadata(path)["loops"] == {"step": 3}
    assert {"module is a torch.nn.modules.linear.Linear", "class is torch.nn.modules.linear.Linear"} <= set(
        find_placeholders(given)
    )
    assert not Path("touched").exists()


def test_recursive_containers_are_listed_once() -> None:
    value: list[Any] = [Placeholder("a.B")]
    value.append(value)
    for _ in range(100):
        value = [value, value]
    assert len(list(find_placeholders({"x": value}))) == 1


def test_a_placeholder_does_nothing(path: Path) -> None:
    torch.save({"hyper_parameters": FOREIGN}, path)
    given = load_checkpoint(path)["hyper_parameters"]
    assert isinstance(given["module"], Placeholder)
    with pytest.raises(TypeError):
        given["function"](1)
    with pytest.raises(AttributeError):
        given["module"].weight  # noqa: B018


class ByKeyword:
    """Made by ``NEWOBJ_EX``."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        import copyreg

        return copyreg.__newobj_ex__, (subprocess.Popen, (["touch", "touched"],), {})  # type: ignore[attr-defined]


def raw(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


TOUCH = b"X\x0d\x00\x00\x00touch touched\x85R"  # a call with one text
RANGE = name("builtins", "range") + b"\x8a\x05\x00\x00\x00\x00\x10\x85R"  # of 68 billion numbers
ENDLESS = b")" + b"2\x86" * 60  # (t, t) sixty times, whose hash is that of 2**60 tuples
ATTACKS = {
    "system": raw(name("posix", "system"), TOUCH),
    "system by its other name": raw(name("os", "system"), TOUCH),
    "eval": raw(name("builtins", "eval"), TOUCH),
    "eval of Python 2": raw(name("__builtin__", "eval"), TOUCH),
    "exec": raw(name("builtins", "exec"), TOUCH),
    "import": raw(name("builtins", "__import__"), TOUCH),
    "Popen": raw(name("subprocess", "Popen"), TOUCH),
    "Popen as an object": raw(name("subprocess", "Popen"), b"X\x01\x00\x00\x00a\x85\x81"),
    "runpy": raw(name("runpy", "run_path"), TOUCH),
    "getattr of a real object": raw(
        name("builtins", "getattr"), name("builtins", "str"), b"X\x06\x00\x00\x00format\x86R"
    ),
    "result of getattr": raw(
        name("builtins", "getattr"), name("subprocess", "Popen"), b"X\x08\x00\x00\x00__call__\x86R", TOUCH
    ),
    "result of partial": raw(name("functools", "partial"), name("builtins", "eval"), b"\x85R", TOUCH),
    "map": raw(name("builtins", "map"), name("builtins", "eval"), b"](X\x01\x00\x00\x001e\x86R"),
    "inst": b"(X\x01\x00\x00\x00aiposix\nsystem\n.",
    "inst of a harmless class": b"(icollections\nOrderedDict\n.",
    "obj": raw(b"(", name("posix", "system"), b"X\x01\x00\x00\x00ao"),
    "extension": raw(b"\x82\x01"),
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01a\x85R.",
    "rebuild with a foreign function": raw(
        name("torch._tensor", "_rebuild_from_type_v2"), name("posix", "system"), b"NX\x01\x00\x00\x00a\x85NtR"
    ),
    "state of a class": raw(name("collections", "Counter"), b"}X\x01\x00\x00\x00a\x4b\x01sb"),
    "items of an object": raw(name("torch", "device"), b"X\x03\x00\x00\x00cpu\x85R", b"K\x01a"),
    "persistent": raw(b"(X\x06\x00\x00\x00moduleK\x01tQ"),
    "persistent text": b"\x80\x02Pmodule\n.",
    "endless fraction": raw(name("fractions", "Fraction"), b"X\x0a\x00\x00\x001e10000000\x85R"),
    "endless set": raw(name("builtins", "set"), RANGE, b"\x85R"),
    "endless frozenset": raw(name("builtins", "frozenset"), RANGE, b"\x85R"),
    "endless queue": raw(name("collections", "deque"), RANGE, b"\x85R"),
    "endless counter": raw(name("collections", "Counter"), RANGE, b"\x85R"),
    "endless array": raw(name("builtins", "bytearray"), b"\x8a\x05\x00\x00\x00\x00\x10\x85R"),
    "endless storage": raw(name("torch", "FloatStorage"), b"\x8a\x05\x00\x00\x00\x00\x10\x85R"),
    "endless tensor": raw(name("torch", "Tensor"), b"J\xff\xff\xff\x7f\x85R"),
    **{
        f"endless {what}, made into a tensor": raw(
            name("torch._tensor", "_rebuild_from_type_v2"), b"(", function, name("torch", "Tensor"), given, b"}tR"
        )
        for what, function, given in (
            ("array", name("builtins", "bytearray"), b"\x8a\x05\x00\x00\x00\x00\x10\x85"),
            ("tensor", name("torch", "Tensor"), b"J\xff\xff\xff\x7f\x85"),
            ("storage", name("torch", "FloatStorage"), b"J\xff\xff\xff\x7f\x85"),
            ("list", name("builtins", "list"), RANGE + b"\x85"),
            ("set", name("builtins", "set"), RANGE + b"\x85"),
        )
    },
    "endless size": raw(name("torch", "Size"), RANGE, b"\x85R"),
    "endless entry of an ordered dict": raw(name("collections", "OrderedDict"), b"]", RANGE, b"a\x85R"),
    "endless bytes": raw(b"\x96\x00\x00\x00\x00\x10\x00\x00\x00"),
    "another encoding": raw(name("_codecs", "encode"), b"X\x01\x00\x00\x00aX\x05\x00\x00\x00hex_c\x86R"),
    "endless key": raw(b"}", ENDLESS, b"K\x01s"),
    "endless key of many": raw(b"}(", ENDLESS, b"K\x01u"),
    "endless entry": raw(b"\x8f(", ENDLESS, b"\x90"),
    "endless entry of a frozenset": raw(b"(", ENDLESS, b"\x91"),
    **{
        f"endless {what}": raw(*parts)
        for what, parts in {
            "function": (ENDLESS, b")R"),
            "list as a function": (b"]" + b"q\x00h\x00h\x00\x86" * 60, b")R"),
            "reference": (b"(", ENDLESS, b"tQ"),
            "encoding": (name("_codecs", "encode"), b"X\x01\x00\x00\x00a", ENDLESS, b"\x86R"),
            "key of an ordered dict": (name("collections", "OrderedDict"), ENDLESS, b"\x85R"),
            "key in a list": (name("collections", "OrderedDict"), b"]", ENDLESS, b"K\x01\x86a\x85R"),
            "layout": (name("torch._utils", "_rebuild_sparse_tensor"), b"(", ENDLESS, b"NtR"),
            "scheme": (name("torch._utils", "_rebuild_qtensor"), b"(", ENDLESS * 7, b"tR"),
            "result": (b"}K\x01", ENDLESS, b"s"),
        }.items()
    },
    "endless entry of a list": raw(name("builtins", "set"), b"]", ENDLESS, b"a\x85R"),
    "state of a function": raw(name("torch._utils", "_rebuild_tensor_v2"), b"}X\x01\x00\x00\x00aK\x01sb"),
    **{f"reference to {module}": raw(name(module, "environ")) for module in ("os", "posix", "nt", "sys")},
    "entries of a placeholder": raw(name("a", "Tags"), b")R(K\x01\x90"),
    "keywords of an allowed class": raw(name("collections", "OrderedDict"), b")}\x92"),
    "too short": b"\x80\x02R.",
    "nothing": b"",
}


def archive(path: Path, pickled: bytes) -> None:
    """A file of torch's format around a pickle."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as given:
        records = {record: given.read(record) for record in given.namelist()}
    with zipfile.ZipFile(path, "w") as made:
        for record, content in records.items():
            made.writestr(record, pickled if record.endswith("data.pkl") else content)


@pytest.mark.parametrize("reading", [load_checkpoint, read_metadata])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_code_is_refused(path: Path, attack: bytes, reading: Callable[[Path], Any]) -> None:
    archive(path, attack)
    with pytest.raises(CheckpointError, match="execute code") as error:
        reading(path)
    assert "\n" not in str(error.value)
    assert not Path("touched").exists()


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (ATTACKS["state of a function"], "it sets the state of a function"),
        (raw(b")(K\x01e"), "it adds items to a tuple"),
    ],
)
def test_the_reason_of_a_refusal_is_reported(path: Path, attack: bytes, reason: str) -> None:
    archive(path, attack)
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(path)


def test_objects_of_a_later_version_of_python_become_placeholders(path: Path) -> None:
    archive(path, raw(b"}X\x01\x00\x00\x00a", name("pathlib._local", "Path"), b"X\x01\x00\x00\x00b\x85Rs"))
    assert repr(load_checkpoint(path)["a"]) == "<pathlib._local.Path: not loaded>"


@pytest.mark.parametrize(
    "evil",
    [Called(os.system, "touch touched"), Called(eval, "shout(1)"), Called(getattr, os, "system"), ByKeyword()],
    ids=["system", "eval", "getattr", "newobj_ex"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_attack_among_hyperparameters_is_refused(path: Path, evil: Any, protocol: int) -> None:
    try:
        torch.save(TENSORS | {"hyper_parameters": FOREIGN | {"evil": evil}}, path, pickle_protocol=protocol)
    except TypeError:  # a module as an argument cannot be pickled
        torch.save(TENSORS | {"hyper_parameters": FOREIGN | {"evil": Called(getattr, 1, "real")}}, path)
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError, match="execute code"):
            reading(path)
    assert not Path("touched").exists()


def test_no_state_of_a_foreign_class_is_set_and_no_foreign_function_is_called(path: Path) -> None:
    held = {"hyper_parameters": {"a": Stateful(), "b": Called(shout, 1)}}
    torch.save(held, path)
    assert isinstance(load_checkpoint(path)["hyper_parameters"]["a"], Placeholder)
    assert isinstance(load_checkpoint(path)["hyper_parameters"]["b"], Placeholder)
    assert not Path("touched").exists()
    torch.load(path, weights_only=False)  # to see that the test would notice
    assert Path("touched").exists()


def test_of_the_attributes_of_a_state_dict_only_versions_are_kept(path: Path) -> None:
    weights: Any = OrderedDict(a=torch.ones(1))
    weights._metadata, weights.keys = {"": {"version": 1}}, 1
    torch.save({"state_dict": weights}, path)
    assert vars(load_checkpoint(path)["state_dict"]) == {"_metadata": {"": {"version": 1}}}
    for other in (1, {"": 1}, {"": shout}, None):
        weights._metadata = other
        torch.save({"state_dict": weights}, path)
        assert vars(load_checkpoint(path)["state_dict"]) == {}


def test_containers_that_multiply_are_refused(path: Path) -> None:
    """Whatever prints, copies or compares them would not end."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    recursive: list[Any] = []
    recursive.append(recursive)
    for inner in (value, {"a": value}, recursive, Called(slice, value)):
        torch.save({"hyper_parameters": inner}, path)
        with pytest.raises(CheckpointError, match="it has containers that multiply"):
            load_checkpoint(path)


def test_legacy_formats_are_refused(path: Path) -> None:
    evil = {"state_dict": Called(os.system, "touch touched"), "hyper_parameters": FOREIGN}
    torch.save(evil, path, _use_new_zipfile_serialization=False)
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError):
            reading(path)
    with tarfile.open(path, "w") as tar:
        for member in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(evil if member == "pickle" else 1, 2)
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError):
            reading(path)
    assert not Path("touched").exists()


def test_a_compressed_file_is_refused_before_it_is_expanded(path: Path) -> None:
    torch.save(TENSORS | {"zeros": "0" * 10**7}, path)
    with zipfile.ZipFile(path) as given:
        records = {record: given.read(record) for record in given.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for record, content in records.items():
            made.writestr(record, content)
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError, match="it is compressed"):
            reading(path)


def test_a_file_whose_records_overlap_is_refused_before_it_is_read(path: Path) -> None:
    """Each name stands for the same bytes: a small file would take any memory and time."""
    torch.save({"w": torch.zeros(1 << 16)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        for number in range(2000):
            record = copy.copy(largest)
            record.filename = f"{largest.filename}{number}"
            archive.filelist.append(record)
        archive._didModify = True  # type: ignore[attr-defined]
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError, match="its records overlap"):
            reading(path)
    assert "its records overlap" in str(find_damage(path))


ONE = torch.ones(1)
MANY = 1 << 28


@pytest.mark.parametrize(
    "attack",
    [
        ONE.expand(MANY),
        [ONE.expand(1 << 24) for _ in range(8)],
        Called(torch._utils._rebuild_device_tensor_from_cpu_tensor, ONE.expand(MANY), torch.float64, "cpu", False),
    ],
    ids=["one", "many", "converted"],
)
def test_tensors_that_are_larger_than_the_file_are_refused(path: Path, attack: Any) -> None:
    torch.save({"hyper_parameters": attack}, path)
    for reading in (load_checkpoint, read_metadata, lambda p: load_checkpoint(p, lazy=True)):
        with pytest.raises(CheckpointError, match="larger than the file"):
            reading(path)
    torch.save({"hyper_parameters": [ONE.expand(1000), torch.zeros(0, 5), ONE[0], torch.ones(4, 4).T]}, path)
    assert load_checkpoint(path)["hyper_parameters"][0].shape == (1000,)


def test_tensors_get_no_hooks_and_no_attributes_that_hide_their_own(path: Path) -> None:
    weight: Any = nn.Parameter(torch.ones(2))
    weight.is_shared = weight.detach = True
    weight._backward_hooks = OrderedDict({0: list})
    buffer: Any = torch.ones(3)
    buffer.is_shared = buffer.names_of = "a"
    torch.save({"state_dict": {"w": weight, "b": buffer}}, path)
    found = load_checkpoint(path)["state_dict"]
    assert isinstance(found["w"], nn.Parameter)
    assert vars(found["w"]) == {}
    assert vars(found["b"]) == {"names_of": "a"}
    assert found["w"]._backward_hooks is None
    assert torch.equal(found["w"].detach(), torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*")
def test_torchscript_archives_are_not_loaded(path: Path) -> None:
    torch.jit.script(nn.Linear(1, 1)).save(str(path))
    for reading in (load_checkpoint, read_metadata):
        with pytest.raises(CheckpointError):
            reading(path)


class Normalization:
    """An object as modules save it in ``on_save_checkpoint``."""

    def __init__(self, mean: float) -> None:
        self.mean = mean


class Opens:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key of a user, and nothing that this process has sealed before."""
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    monkeypatch.setattr(unpickle, "_written", set())
    return tmp_path / "key"


def write(path: Path, value: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(2)}, "own": value}, path)
    return path


def test_objects_are_loaded_by_the_user_and_the_process_that_saved_them(tmp_path: Path, key: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"norm": Normalization(0.5)})
    assert load_checkpoint(path)["own"]["norm"].mean == 0.5
    unpickle._written.clear()  # as in another process
    assert load_checkpoint(path)["own"]["norm"].mean == 0.5
    assert load_checkpoint(path, lazy=True)["own"]["norm"].mean == 0.5
    assert torch.load(path, weights_only=False)["own"]["norm"].mean == 0.5  # by torch itself
    key.unlink()
    write(path, {"norm": Normalization(0.25)})
    unpickle._written.clear()
    assert load_checkpoint(path)["own"]["norm"].mean == 0.25


def test_objects_of_others_are_loaded_if_the_user_trusts_the_file(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.ckpt", Normalization(0.5))
    unpickle._written.clear()
    key.unlink()
    user_key.sign({})  # another key
    own = load_checkpoint(path)["own"]
    assert find_objects({"own": own}) == [f"own is a {__name__}.Normalization"]
    with pytest.raises(AttributeError, match="trust=true"):
        own.mean  # noqa: B018
    monkeypatch.setattr(this_process, "trusts_all", True)
    assert load_checkpoint(path)["own"].mean == 0.5


def test_a_seal_of_another_file_executes_nothing(tmp_path: Path, key: Path) -> None:
    ours, theirs = write(tmp_path / "ours.ckpt", Normalization(0.5)), tmp_path / "theirs.ckpt"
    torch.save({"state_dict": {}, "own": Opens(tmp_path / "executed")}, theirs)
    with zipfile.ZipFile(ours) as source, zipfile.ZipFile(theirs, "a") as target:
        root = next(name for name in target.namelist() if name.endswith("/data.pkl")).rpartition("/")[0]
        target.writestr(f"{root}/{unpickle.SEAL}", source.read(f"archive/{unpickle.SEAL}"))
    with pytest.raises(CheckpointError, match=r"execute|Path"):
        load_checkpoint(theirs)
    assert not (tmp_path / "executed").exists()


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy of an archive whose records are changed, or left out."""
    copied = path.with_name("copy.ckpt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copied, "w") as target:
        for record in source.namelist():
            if (content := change(record, source.read(record))) is not None:
                target.writestr(record, content)
    return copied


def test_a_file_without_its_seal_or_with_another_pickle_gives_placeholders(tmp_path: Path, key: Path) -> None:
    path = write(tmp_path / "a.ckpt", Normalization(0.5))
    write(tmp_path / "b.ckpt", Normalization(0.25))
    with zipfile.ZipFile(tmp_path / "b.ckpt") as archive:
        other = archive.read(f"archive/{unpickle.SEAL}")
    unpickle._written.clear()
    changes: dict[str, Callable[[str, bytes], bytes | None]] = {
        "none": lambda _, content: content,
        "no seal": lambda record, content: None if record.endswith(unpickle.SEAL) else content,
        "empty seal": lambda record, content: b"" if record.endswith(unpickle.SEAL) else content,
        "seal of another file": lambda record, content: other if record.endswith(unpickle.SEAL) else content,
        "another number": lambda record, content: content.replace(b"mean", b"MEAN"),
    }
    for name, change in changes.items():
        own = load_checkpoint(rewritten(path, change))["own"]
        assert isinstance(own, Normalization if name == "none" else Placeholder), name


def test_a_signature_of_something_else_is_no_seal(tmp_path: Path, key: Path) -> None:
    """Somebody else's text that this user signs, such as an override in a record, never has the form of a seal."""
    path = write(tmp_path / "a.ckpt", Normalization(0.5))
    unpickle._written.clear()
    with zipfile.ZipFile(path) as archive:
        sealed = unpickle._sealed(archive.read("archive/data.pkl"))
    for signed in ({"config": sealed}, [sealed], sealed["checkpoint"], sealed | {"name": "a"}):
        seal = str(user_key.sign(signed)).encode()
        own = load_checkpoint(rewritten(path, lambda r, c, seal=seal: seal if r.endswith(unpickle.SEAL) else c))["own"]  # type: ignore[misc]
        assert isinstance(own, Placeholder)


def test_a_pickle_that_is_exchanged_after_its_seal_was_verified_is_not_loaded(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a colleague who may write to the folder of a shared project."""
    path = write(tmp_path / "a.ckpt", Normalization(0.5))
    with zipfile.ZipFile(path) as archive:
        record = archive.getinfo("archive/data.pkl")
        program = archive.read(record)
    evil = raw(name("os", "mkdir"), b"U\x08executed\x85R").ljust(len(program), b"\0")
    verify = unpickle._is_trusted

    def exchange(reader: Any) -> bool:
        found = verify(reader)
        with path.open("r+b") as file:
            content = file.read()
            file.seek(content.index(program))
            file.write(evil)
        return found

    monkeypatch.setattr(unpickle, "_is_trusted", exchange)
    monkeypatch.chdir(tmp_path)
    assert load_checkpoint(path)["own"].mean == 0.5
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_plain_values_has_no_seal(tmp_path: Path, key: Path) -> None:
    with zipfile.ZipFile(write(tmp_path / "a.ckpt", {"a": [1.0, Path("b")]})) as archive:
        assert not [name for name in archive.namelist() if name.endswith(unpickle.SEAL)]


def test_an_object_whose_class_has_moved_is_left_out(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.ckpt", Normalization(0.5))
    monkeypatch.delattr(sys.modules[__name__], "Normalization")
    assert find_objects(load_checkpoint(path)) == [f"own is a {__name__}.Normalization"]
