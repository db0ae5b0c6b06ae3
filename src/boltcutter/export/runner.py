"""Load an exported model and run it; needs only NumPy, and torch or ONNX Runtime.

This file imports nothing of the library, so a copy of it works in any program: ``Runner(folder)(inputs)``. As a
program, ``python -I runner.py <folder> <threads> <descriptor>``, it serves requests over a connection, by which exports
are verified in a process that has never imported the code of the model.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CARD = "card.json"
MAX_CARD, MAX_LISTS = 1 << 25, 1 << 20  # bytes, and lists and objects, each of which takes 64 bytes of memory
CARD_TYPES = {"format": str, "program": str | None, "files": dict, "inputs": list, "outputs": list}
SHAPED = ("inputs", "outputs", "cache")  # lists of the card, of objects with a shape
WARMUP, MIN_CALLS, MAX_CALLS, MAX_SECONDS = 3, 10, 300, 1.0  # of each measured latency


class Runner:
    """An exported model as a function of arrays.

    Args:
        folder: Folder of the export, with its ``card.json``.
        threads: Number of threads; None: as many as the engine chooses.
        card: Contents of ``card.json``, where they have been read and verified.

    Attributes:
        card: Contents of ``card.json``: inputs and outputs with shapes and dtypes, classes, metrics, versions.

    Raises:
        ValueError: The folder holds no export, a file has changed, or the format has no graph that could be run.
    """

    def __init__(self, folder: str | Path, threads: int | None = None, card: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.card = read_card(self.folder) if card is None else card
        for name, facts in self.card["files"].items():
            file = self.folder / name
            if not file.is_file() or sha256(file) != facts["sha256"]:
                raise ValueError(f"{file} is not the file that {CARD} describes; export it again")
        name = self.card["program"] or ""
        loaders: dict[str, Callable[[Path, int | None, str], Callable[..., list[Array]]]] = {
            ".pt2": partial(load_torch, validate=not self.card.get("cache")),
            ".onnx": load_onnx,
        }
        if Path(name).suffix not in loaders:
            raise ValueError(f"{self.folder}: {self.card['format']} holds only weights; use another format")
        self._call = loaders[Path(name).suffix](self.folder / name, threads, self.card["files"][name]["sha256"])

    def __call__(self, *inputs: Array, cache: list[Array] | None = None) -> list[Array]:
        """Return the outputs for a batch, in the order of ``card["outputs"]``.

        Args:
            inputs: The batch, in the order of ``card["inputs"]``.
            cache: Keys and values of the previous tokens, of a language model with ``card["cache"]``; extended in place
                by those of the inputs. Pass an empty list at first.

        Raises:
            ValueError: The export has no cache.
        """
        shapes = [facts["shape"] for facts in self.card.get("cache") or []]
        if cache is not None and not shapes:
            raise ValueError(f"{self.folder}: the export has no cache; give all tokens in each call")
        past = cache or [np.zeros((len(inputs[0]), heads, 0, size), np.float32) for _, heads, _, size in shapes]
        outputs = self._call(*inputs, *past)
        count = len(self.card["outputs"])
        if cache is not None:
            cache[:] = outputs[count:]
        return outputs[:count]


def read_card(folder: Path) -> dict[str, Any]:
    """Read ``card.json``.

    Raises:
        ValueError: The folder holds no export, or its card is damaged, or names files elsewhere.
    """
    try:
        with open_file(folder / CARD) as file:
            content = file.read(MAX_CARD)
        if content.count(b"[") + content.count(b"{") > MAX_LISTS:
            raise ValueError(f"more than {MAX_LISTS} lists and objects")
        card: dict[str, Any] = json.loads(content)
        program, files = card["program"], card["files"]
        if wrong := [key for key, kind in CARD_TYPES.items() if not isinstance(card.get(key), kind)]:
            raise TypeError(f"{wrong[0]} is missing, or has another type")
        if not all(isinstance(facts["shape"], list) for key in SHAPED for facts in card.get(key) or []):
            raise TypeError("a shape has another type")
        is_complete = all(facts["sha256"] and Path(name).name == name for name, facts in files.items())
        is_listed = program is None or program in files
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no export ({CARD} is missing); give the folder of an export") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{folder / CARD} is damaged ({error!r:.100}); export it again") from None
    if not (is_complete and is_listed):
        raise ValueError(f"{folder / CARD} names a file that is not listed, or outside of its folder; export it again")
    return card


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open_file(path) as file:
        return digest(file)


def open_file(path: Path) -> IO[bytes]:
    """Open a file of somebody else, unless it is a FIFO, which would block, or a device."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(number).st_mode):
        return open(number, "rb")
    os.close(number)
    raise OSError(f"{path} is not an ordinary file")


def digest(file: IO[bytes]) -> str:
    """SHA-256 of an open file, in hexadecimal, read in blocks: it may be larger than the memory."""
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def read_once(path: Path, expected: str) -> bytes:
    """Read a file with this SHA-256, once, as it may change after it was verified."""
    with suppress(OSError), open_file(path) as file:
        content = file.read()
        if hashlib.sha256(content).hexdigest() == expected:
            return content
    raise ValueError(f"{path} is not the file that {CARD} describes; export it again")


def load_torch(path: Path, threads: int | None, expected: str, *, validate: bool = True) -> Callable[..., list[Array]]:
    """Load a program of ``torch.export`` with this SHA-256; validation of inputs takes as long as several tokens."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # of torch 2.11; nobody writes to it
        module: Any = torch.export.load(io.BytesIO(read_once(path, expected))).module()
    module.validate_inputs = validate

    def call(*inputs: Array) -> list[Array]:
        with torch.inference_mode():
            outputs = module(*map(torch.from_numpy, inputs))
        return [output.numpy() for output in outputs]

    return call


def load_onnx(path: Path, threads: int | None, expected: str) -> Callable[..., list[Array]]:
    """Load an ONNX file with this SHA-256, and the weights that it names in files of its folder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    options.add_session_config_entry("session.load_model_format", "ONNX")  # of bytes it would also take its own format
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(read_once(path, expected), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def call(*inputs: Array) -> list[Array]:
        outputs: list[Array] = session.run(None, dict(zip(names, inputs, strict=True)))
        return outputs

    return call


def measure(call: Callable[[], Any]) -> float:
    """Median time of a call in milliseconds."""
    seconds: list[float] = []
    for count in range(WARMUP + MAX_CALLS):
        begin = time.perf_counter()
        call()
        if count >= WARMUP:
            seconds.append(time.perf_counter() - begin)
        if len(seconds) >= MIN_CALLS and sum(seconds) > MAX_SECONDS:
            break
    return 1e3 * statistics.median(seconds)


def answer(runner: Runner, what: str, inputs: list[Array]) -> Any:
    """Run a batch, with or without a cache, or measure the latency of one in milliseconds."""
    if what == "measure":
        return measure(lambda: runner(*inputs))
    if what == "generate":  # half of the tokens, then one at a time
        cache: list[Array] = []
        parts = np.split(inputs[0], range(inputs[0].shape[1] // 2, inputs[0].shape[1]), axis=1)
        return np.concatenate([runner(part, cache=cache)[0] for part in parts], axis=1)
    begin = time.perf_counter()
    outputs = runner(*inputs)
    return outputs, time.perf_counter() - begin


def serve_requests(folder: Path, threads: int, connection: Connection) -> None:
    """Serve requests until the other process closes the connection."""
    runner = Runner(folder, threads)
    connection.send(list(sys.modules))
    while True:
        try:
            what, inputs = connection.recv()
        except EOFError:
            return
        connection.send(answer(runner, what, inputs))


if __name__ == "__main__":
    serve_requests(Path(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[3])))
