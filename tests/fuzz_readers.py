"""Give a reader random changes of valid files: ``python fuzz_readers.py <reader> <scratch> <seconds> [<seed>]``.

A reader may return, or raise an error that its callers report in one line. It must not import, execute, write or
contact anything, nor use a gigabyte. Prints the number of files that were read, and what was found, as JSON.
"""

import copy
import io
import json
import pickle
import resource
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audit import Audit
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from boltcutter.assembly.overrides import load_run_config
from boltcutter.checkpoint import load as loading
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_best_by_score
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.project import Project
from boltcutter.run.folder import read_run_config

MAX_GROWTH = 1 << 30  # bytes
PROJECT = Project.find(__file__)
CONFIG: dict[str, Any] = {
    "name": "a",
    "runs": "runs",
    "folder": None,
    "seed": 1,
    "checkpoints": "${folder}/checkpoints",
    "model": {"_target_": "boltcutter.model.linear.Linear", "input_shape": "${data.shape}"},
    "data": {"_target_": "boltcutter.data.digits.Digits", "shape": [1, 8, 8]},
    "trainer": {"_target_": "lightning.Trainer", "max_epochs": 1},
    "callback": {"best": {"_target_": "boltcutter.callback.checkpoint.BestCheckpoint"}},
    "logger": None,
    "choices": {},
}
RECORD: dict[str, Any] = {"id": "a", "name": "a", "config": CONFIG, "attempts": [{"start": "2026-01-01", "end": None}]}
LAUNCH = {"id": "1", "settings": {"_target_": "boltcutter.launch.local.LocalLauncher"}}
RECORD |= {"launch": LAUNCH, "best": "a", "best_by": {}}
CARD = {
    "format": "onnx",
    "program": "model.onnx",
    "files": {"model.onnx": {"sha256": "0"}},
    "inputs": [],
    "outputs": [],
}
STATE = {
    "state_dict": {"w": torch.arange(6.0).view(2, 3)},
    "hyper_parameters": {"a": [1, (2.0, None)], "b": {"c": np.arange(3)}, "p": Path("/a")},
    "global_step": 3,
    "callbacks": {},
    "best": {"mode": "min", "score": 0.5},
}
# Values that are interesting for a reader of JSON.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [10**400, -1, [], {}, [[]], {"_target_": "os.system"}, {"_target_": []}, "${", "${a.b}", "${oc.env:A}"]
    ),
    st.sampled_from(
        ["http://127.0.0.1:9/", "a::b", "../..", "/dev/zero", "a\nb", "\x1b[2J", "os.system", "torch.load"]
    ),
    st.sampled_from(
        ["${oc.create:{}}", "${oc.decode:1}", "lightning.Trainer", "torch.nn.Linear", "_target_", "\ud800"]
    ),
)


@st.composite
def changed_json(draw: Any, valid: Any) -> bytes:
    """The bytes of a JSON value with some entries replaced, added or removed, and sometimes some bytes."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        node = value
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()) or not isinstance(node[key], dict | list) or not node[key]:
                action = draw(st.sampled_from(["replace", "remove", "add"]))
                if action == "remove":
                    del node[key]
                elif action == "replace" or isinstance(node, list):
                    node[key] = copy.deepcopy(draw(VALUES))
                else:
                    node[draw(st.text(max_size=8))] = copy.deepcopy(draw(VALUES))
                break
            node = node[key]
    content = json.dumps(value).encode()
    return draw(changed_bytes(content)) if draw(st.integers(0, 4)) == 0 else content


@st.composite
def changed_bytes(draw: Any, content: bytes) -> bytes:
    """Bytes of which some are replaced, removed, repeated or cut."""
    found = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        size = draw(st.integers(0, 8))
        action = draw(st.integers(0, 3))
        if action == 0:
            found[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif action == 1:
            del found[at : at + size]
        elif action == 2:
            found[at:at] = found[at : at + size] * draw(st.integers(1, 50))
        elif draw(st.booleans()):
            del found[at:]
    return bytes(found)


OPCODES = st.lists(
    st.one_of(
        st.sampled_from([bytes([code]) for code in range(256)]),
        st.sampled_from(
            [
                f"c{name}\n".replace(" ", "\n").encode()
                for name in (
                    *("builtins set", "builtins range", "collections deque", "collections Counter", "os system"),
                    *("builtins getattr", "builtins bytearray", "torch FloatStorage", "torch device", "torch Size"),
                    *("torch._utils _rebuild_tensor_v2", "torch._tensor _rebuild_from_type_v2", "fractions Fraction"),
                    *("decimal Decimal", "numpy dtype", "pathlib PosixPath", "datetime datetime", "a.b C"),
                    *("torch.distributed.checkpoint.metadata Metadata", "numpy._core.multiarray _reconstruct"),
                )
            ]
        ),
        st.sampled_from(
            [b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\x01\x00\x00\x00a"]
        ),
        st.sampled_from(
            [b"(", b"t", b"R", b"\x81", b"b", b"2\x86", b"}", b"]", b")", b"s", b"u", b"e", b"a", b"\x90", b"q\x00"]
        ),
    ),
    max_size=40,
).map(b"".join)


def require_line(error: Exception) -> None:
    """Raise an error that is reported if the message has several lines."""
    if "\n" in str(error):
        raise RuntimeError(f"more than a line: {error!r:.300}")


def write_zip(path: Path, records: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as made:
        for name, content in records.items():
            made.writestr(name, content)


class Readers:
    """For each reader, how a valid file is changed, and how the change is read."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.path = scratch / "checkpoints" / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint(STATE, self.path)
        with zipfile.ZipFile(self.path) as given:
            self.records = {name: given.read(name) for name in given.namelist()}
        self.pickle = next(name for name in self.records if name.endswith("data.pkl"))

    def record(self) -> tuple[Any, Callable[[bytes], object]]:
        """``record.json``, as commands open it."""
        import sklearn.datasets  # noqa: F401 - imported with the digits; its imports are no finding

        from boltcutter.launch.jobs import find_launcher

        def read(content: bytes) -> None:
            (self.scratch / "record.json").write_bytes(content)
            for call in (
                lambda: load_run_config(PROJECT, self.scratch),
                lambda: read_run_config(PROJECT, self.scratch, instantiates=False),
                lambda: find_launcher(self.scratch),
            ):
                try:
                    call()
                except ConfigError as error:
                    require_line(error)

        return changed_json(RECORD), read

    def search(self) -> tuple[Any, Callable[[bytes], object]]:
        """``search.json``, of which this user has signed another one."""
        from boltcutter.search.plan import SIGNED, continued

        valid = {
            "overrides": ["a=1"],
            "settings": {},
            "metrics": [["a", "min"]],
            "fixed": [{}],
            "devices": 1,
            "gpus": 0,
        }
        valid["signature"] = user_key.sign({name: valid.get(name) for name in SIGNED} | {"gpus": -987654321})

        def read(content: bytes) -> None:
            (self.scratch / "search.json").write_bytes(content)
            continued(PROJECT, self.scratch, [])

        return changed_json(valid), read

    def journal(self) -> tuple[Any, Callable[[bytes], object]]:
        """``study.log`` of a search."""
        from boltcutter.search.space import Space
        from boltcutter.search.study import LOG, Study

        space = Space({"lr": "loguniform(1e-4, 1)"})
        study = Study(self.scratch, space, [("a", "min")])
        study.enqueue([{"seed": 1}])
        for _ in range(2):
            study.ask(2)
        valid = (self.scratch / LOG).read_bytes()

        def read(content: bytes) -> None:
            (self.scratch / LOG).write_bytes(content)
            found = Study(self.scratch, space, [("a", "min")])
            for sampled in found.ended():
                space.check(sampled.values, [{"seed": 1}])

        return changed_bytes(valid), read

    def checkpoint(self) -> tuple[Any, Callable[[bytes], object]]:
        """A checkpoint: the file, or its pickle."""
        changes = st.one_of(
            changed_bytes(self.path.read_bytes()).map(lambda content: (None, content)),
            changed_bytes(self.records[self.pickle]).map(lambda content: (self.pickle, content)),
            OPCODES.map(lambda content: (self.pickle, b"\x80\x02" + content + b".")),
        )

        def read(change: tuple[str | None, bytes]) -> None:
            name, content = change
            if name is None:
                self.path.write_bytes(content)
            else:
                write_zip(self.path, self.records | {name: content})
            for call in (loading.load_checkpoint, loading.read_metadata, AtomicCheckpointIO().load_checkpoint):
                try:
                    call(self.path)
                except CheckpointError as error:
                    require_line(error)
            find_best_by_score(self.path.parent, warn=lambda text: None)

        return changes, read

    def metadata(self) -> tuple[Any, Callable[[bytes], object]]:
        """``.metadata`` of a sharded checkpoint."""
        from torch.distributed.checkpoint.metadata import Metadata

        from boltcutter.checkpoint import sharded_checkpoint as sharded

        folder = self.path.with_name("shards")
        folder.mkdir(exist_ok=True)
        index = {
            "shards": {"folder": "shards", "files": {}, "orders": {}},
            "state_dict": {"w": torch.empty(2, device="meta")},
        }

        def read(content: bytes) -> None:
            (folder / ".metadata").write_bytes(content)
            sharded.load_into(self.path, index, {"state_dict.w": torch.empty(2)}, alone=True)

        valid = pickle.dumps(Metadata({}, {}, {}))
        return st.one_of(changed_bytes(valid), OPCODES.map(lambda content: b"\x80\x02" + content + b".")), read

    def card(self) -> tuple[Any, Callable[[bytes], object]]:
        """``card.json`` of an export."""
        from boltcutter.export.exported import ExportedModel

        def read(content: bytes) -> None:
            (self.scratch / "card.json").write_bytes(content)
            (self.scratch / "model.onnx").write_bytes(b"")
            ExportedModel(self.scratch, str(self.scratch))

        return changed_json(CARD), read

    def shards(self) -> tuple[Any, Callable[[bytes], object]]:
        """Files of arrays and of tokens."""
        from boltcutter.data.shards import NpyShard
        from boltcutter.data.tokens import open_tokens

        files = io.BytesIO()
        np.save(files, np.arange(12).reshape(4, 3))

        def read(content: bytes) -> None:
            for name in ("inputs.npy", "targets.npy", "tokens.bin"):
                (self.scratch / name).write_bytes(content)
            for call in (
                lambda: NpyShard(self.scratch / "inputs.npy").rows(np.arange(1)),
                lambda: open_tokens(self.scratch / "inputs.npy", "uint16"),
                lambda: open_tokens(self.scratch / "tokens.bin", "uint16"),
            ):
                try:
                    call()
                except ValueError as error:
                    require_line(error)
                except IndexError:  # of the test, as there are no rows
                    continue

        return changed_bytes(files.getvalue()), read

    def bundle(self) -> tuple[Any, Callable[[bytes], object]]:
        """``job.tar.gz`` with the code of a job."""
        from boltcutter.launch.bundle import unpack

        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, kind in (("code/a.py", tarfile.REGTYPE), ("../b", tarfile.SYMTYPE), ("/c", tarfile.LNKTYPE)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "../../a"
                archive.addfile(info)

        def read(content: bytes) -> None:
            import gzip

            (self.scratch / "job.tar.gz").write_bytes(gzip.compress(content, 1))
            target = self.scratch / "unpacked" / str(time.monotonic_ns())
            target.mkdir(parents=True)
            unpack(self.scratch / "job.tar.gz", target)

        return changed_bytes(packed.getvalue()), read

    def requests(self) -> tuple[Any, Callable[[bytes], object]]:
        """Bodies of requests to the server."""
        from starlette.exceptions import HTTPException

        from boltcutter.export.serving import app

        class Predictor:
            form, shape = "image", (1, 8, 8)

            def __getattr__(self, name: str) -> Any:
                return lambda values, *_: np.asarray(values)

        array = io.BytesIO()
        np.save(array, np.zeros((1, 1, 8, 8), np.uint8))

        def read(content: bytes) -> None:
            for kind in (app.JSON, app.NUMPY, ""):
                try:
                    app.decode(Predictor(), kind, content, app.Limits())  # type: ignore[arg-type]
                except (ValueError, HTTPException):
                    continue

        return st.one_of(changed_json({"inputs": [[1, 2], [3]]}), changed_bytes(array.getvalue())), read


EXPECTED = (ConfigError, CheckpointError, ValueError)


def main(name: str, scratch: Path, seconds: float, first: int = 0) -> None:
    """Read changed files for some seconds."""
    warnings.simplefilter("ignore")
    user_key.KEY_FILE = scratch / "key"
    user_key.sign({})
    changes, read = getattr(Readers(scratch), name)()
    packages = {*packages_distributions(), "boltcutter"}
    audit, end, count = Audit(scratch, packages), 0.0, 0
    faults: list[str] = []

    def check(content: Any) -> None:
        nonlocal count
        if time.monotonic() > end or faults:
            return
        count += 1
        began = time.process_time()
        audit.is_active = audit.is_wanted
        try:
            read(content)
        except EXPECTED as error:
            if "\n" in str(error):
                faults.append(f"more than a line: {error!r:.300} of {content!r:.600}")
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error!s:.300} of {content!r:.2000}")
        finally:
            audit.is_active = False
        if time.process_time() - began > 20:
            faults.append(f"it takes {time.process_time() - began:.0f} s to read {content!r:.2000}")
        if audit.found:
            faults.append(f"{audit.found} by {content!r:.2000}")

    before = 0
    for is_wanted, wait in ((False, min(seconds, 20.0)), (True, seconds)):  # first, modules are imported
        audit.is_wanted = is_wanted
        end = time.monotonic() + wait
        while time.monotonic() < end and not faults:
            options: Any = {"max_examples": 50, "deadline": None, "database": None, "phases": [Phase.generate]}
            options |= {"suppress_health_check": list(HealthCheck)}
            seed(first + count)(settings(**options)(given(changes)(check)))()
        before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if growth > MAX_GROWTH:
        faults.append(f"{growth / 2**20:.0f} MiB were used")
    print(json.dumps([count, faults]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
