"""Sharded checkpoints: each rank writes its shard to a folder, and then a file is written that refers to the folder.

The file, ``last.ckpt``, is the checkpoint with meta tensors (shape and dtype) in place of weights and optimizer state.
Their data is in ``last.ckpt.shards-<name>``, in the format of ``torch.distributed.checkpoint``. Shards are written to a
new folder each time and the file is replaced atomically at the end, so the previous checkpoint stays valid until then.

At a URL, each rank writes its shard to a temporary folder and uploads it, and downloads only the files that hold its
parts; ``TMPDIR`` needs space for one shard of each rank of the node.
"""

from __future__ import annotations

import atexit
import enum
import pickle
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boltcutter.checkpoint.atomic import fsync_folder
from boltcutter.checkpoint.storage import CheckpointError, error_text, is_url, repeat, resolve_filesystem
from boltcutter.config.errors import one_line
from boltcutter.protocols import gather_objects

WEIGHTS = ("current_model_state", "state_dict")  # entries of a checkpoint; the first exists if the second is an average
SHARDED_KEYS = (*WEIGHTS, "optimizer_states")
OFFSET = (torch.Size, type(None))  # of a shard in its tensor
STORAGE_CLASSES = {"ChunkStorageMetadata", "StorageMeta", "TensorProperties", "TensorStorageMetadata"}
MAX_METADATA = 1 << 30  # bytes
METADATA_CLASSES = STORAGE_CLASSES | {"Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"}
ALLOWED_CLASSES = {  # classes in the metadata of torch.distributed.checkpoint
    "torch.distributed.checkpoint.metadata": METADATA_CLASSES,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    **{module: {"PosixPath"} for module in ("pathlib", "pathlib._local")},
}

_copies: dict[str, Path] = {}  # the local copy of the shards that were last read, by their URL


def save(checkpoint: dict[str, Any], path: str | Path, orders: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Write the shards of a checkpoint; called on all ranks.

    Args:
        checkpoint: Its tensors may be ``DTensor``.
        path: Path of the file that will refer to the shards.
        orders: Row indices of permuted tensors, by name (``state_dict.model.weight``).

    Returns:
        The contents of the file on rank 0, None on other ranks.

    Raises:
        OSError: A rank could not write its shard.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    rank = dist.get_rank()
    tensors, index = _replace_tensors(checkpoint, "meta")
    name = [secrets.token_hex(4)]
    dist.broadcast_object_list(name)
    place = f"{path}.shards-{name[0]}"
    with TemporaryDirectory() if is_url(path) else nullcontext(place) as folder:
        with _convert_rank_error():
            save_shards({name: old for name, (old, _) in tensors.items()}, storage_writer=FileSystemWriter(folder))
        written = [file for file in sorted(Path(folder).iterdir()) if _is_written_by(file.name, rank)]
        error = _upload(written, place) if is_url(path) else ""
        known = {file.name: [file.stat().st_size, _checksum(file)] for file in written}
    everyone = gather_objects((error, known))
    if failed := [f"rank {rank}: {error}" for rank, (error, _) in enumerate(everyone) if error]:
        raise OSError(failed[0])
    if rank:
        return None
    if not is_url(path):
        fsync_folder(Path(place))
        fsync_folder(Path(place).parent)
    files = {name: entry for _, some in everyone for name, entry in some.items()}
    return index | {"shards": {"folder": place.rpartition("/")[2], "files": files, "orders": dict(orders)}}


def _upload(files: list[Path], url: str) -> str:
    """Upload files into a folder at a URL; returns a description of the error, empty if there was none."""
    try:
        store, place = resolve_filesystem(url)
        for file in files:
            repeat(url, partial(store.put_file, str(file), f"{place}/{file.name}"))
    except Exception as error:  # each storage raises its own
        return error_text(error)
    return ""


def find_damage(path: str | Path, index: Mapping[str, Any]) -> str | None:
    """Verify the shards of a checkpoint; return a description of the damage, or None.

    Those at a URL are verified by their size, and by their checksum when they are downloaded.
    """
    shards = index["shards"]
    if not _are_shards(shards):
        return "its list of shards has another form than those that are written"
    if odd := [name for name in (shards["folder"], *shards["files"]) if not _is_plain_name(name)]:
        return f"its shard {odd[0]!r} is outside of its folder"
    store, place = resolve_filesystem(path)
    for name, (size, checksum) in shards["files"].items():
        file = f"{place.rpartition('/')[0]}/{shards['folder']}/{name}"
        if not store.isfile(file):
            return f"its shard {shards['folder']}/{name} is missing"
        if store.size(file) != size or (not is_url(path) and _checksum(Path(file)) != checksum):
            return f"its shard {shards['folder']}/{name} is damaged"
    return None


def load_into(path: str | Path, index: Mapping[str, Any], into: dict[str, Tensor], *, alone: bool) -> None:
    """Fill tensors by name from the shards; of a ``DTensor``, only this rank's shard. Other tensors get rows in order.

    Raises:
        CheckpointError: The shards cannot be read, or hold more than data.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process.*")
        try:
            with _convert_rank_error():
                load(into, storage_reader=_reader(path, index), planner=_planner(), no_dist=alone)
        except (OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: its shards cannot be read ({one_line(error)}); use another checkpoint"
            ) from error
    for name, order in index["shards"]["orders"].items():
        if name in into:
            into[name].copy_(into[name][order.argsort()])


def load_full(path: str | Path, index: dict[str, Any]) -> dict[str, Any]:
    """Load all shards into one checkpoint.

    Raises:
        CheckpointError: A shard is missing, damaged, or holds more than data.
    """
    if why := find_damage(path, index):
        raise CheckpointError(f"{path}: {why}; use another checkpoint")
    whole = sum(meta.nbytes for meta, _ in _replace_tensors(index, "meta")[0].values())
    if whole > sum(size for size, _ in index["shards"]["files"].values()):
        raise CheckpointError(f"{path}: its tensors are larger than its shards; use another checkpoint")
    tensors, found = _replace_tensors(index, "cpu")
    load_into(path, index, {name: new for name, (_, new) in tensors.items()}, alone=True)
    del found["shards"]
    return found


def _replace_tensors(
    checkpoint: Mapping[str, Any], device: str
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Any]]:
    """Copy a checkpoint with empty tensors on ``device``; also return the old and the new tensors by name."""
    tensors: dict[str, tuple[Tensor, Tensor]] = {}

    def replaced(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value, torch.empty(value.shape, dtype=value.dtype, device=device)
            return tensors[name][1]
        if isinstance(value, Mapping):
            return {key: replaced(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(replaced(inner, f"{name}.{i}") for i, inner in enumerate(value))
        return value

    copied = {key: replaced(value, key) if key in SHARDED_KEYS else value for key, value in checkpoint.items()}
    return tensors, copied


def _are_shards(shards: Any) -> bool:
    """Return whether an entry has the types that ``save`` writes; a checkpoint of somebody else may have others."""
    match shards:
        case {"folder": str(), "files": dict(files), "orders": dict(orders)}:
            return (
                all(isinstance(name, str) for name in files)
                and all(isinstance(pair, list | tuple) and [*map(type, pair)] == [int, int] for pair in files.values())
                and all(isinstance(order, Tensor) and order.dim() == 1 for order in orders.values())
            )
    return False


def _is_written_by(name: str, rank: int) -> bool:
    """Return whether a file was written by a rank."""
    return name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))


def _checksum(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


@contextmanager
def _convert_rank_error() -> Iterator[None]:
    """Raise the error of the first rank that failed."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {why}") from why


def _download(path: str | Path, index: Mapping[str, Any], names: set[str]) -> Path:
    """The folder with shards of a checkpoint: of one at a URL, a local copy that has these files.

    Raises:
        OSError: A file cannot be downloaded, or is damaged.
    """
    shards = index["shards"]
    if not _is_plain_name(shards["folder"]):
        raise pickle.UnpicklingError("its folder of shards is outside of its own")
    if not shards["files"].keys() >= names:  # which nobody has verified, and which may be FIFOs
        raise pickle.UnpicklingError("a shard is not in its list of shards")
    url = f"{str(path).rpartition('/')[0] or '.'}/{shards['folder']}"
    if not is_url(path):
        return Path(url)
    if url not in _copies:
        _remove_copies()
        _copies[url] = Path(mkdtemp())
    store, place = resolve_filesystem(url)
    for name in names:
        file = _copies[url] / name
        if not file.exists():
            repeat(url, partial(store.get_file, f"{place}/{name}", str(file)))
            if [file.stat().st_size, _checksum(file)] != [*shards["files"][name]]:
                file.unlink()
                raise OSError(f"its shard {shards['folder']}/{name} is damaged")
    return _copies[url]


@atexit.register
def _remove_copies() -> None:
    while _copies:
        shutil.rmtree(_copies.popitem()[1], ignore_errors=True)


def _read_metadata(file: Path) -> bytes:
    if file.stat().st_size > MAX_METADATA:
        raise pickle.UnpicklingError(f"its metadata have more than {MAX_METADATA >> 20} MiB")
    return file.read_bytes()


def _reader(path: str | Path, index: Mapping[str, Any]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    folder = _download(path, index, {".metadata"})
    found: Metadata = _Unpickler(BytesIO(_read_metadata(folder / ".metadata"))).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError("its metadata has another type")
    for name, kind in found.state_dict_metadata.items():
        if type(kind) is not TensorStorageMetadata:  # torch would unpickle it and so execute code
            raise pickle.UnpicklingError(f"{name} is not a tensor")
    for info in (found.storage_data or {}).values():
        if not _is_plain_name(getattr(info, "relative_path", None)):
            raise pickle.UnpicklingError("a shard is outside of its folder")
    found.storage_meta = found.storage_meta or StorageMeta()

    class Reader(FileSystemReader):
        """Returns the metadata that was read safely; torch's reader would execute code in it."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return found

        def read_data(self, plan: Any, planner: Any) -> Any:
            _download(path, index, {self.storage_data[item.storage_index].relative_path for item in plan.items})
            return super().read_data(plan, planner)

    return Reader(folder)


def _planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        """Loads only tensors; torch's planner would unpickle other values."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")

    return Planner()


def _is_plain_name(name: Any) -> bool:
    """Return whether a name refers to an entry of the same folder."""
    return isinstance(name, str) and "/" not in name and "\\" not in name and name not in ("", ".", "..")


class _Unpickler(pickle._Unpickler):  # the Python implementation, of which every opcode can be overridden
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def load(self) -> Any:
        try:
            return super().load()
        except (pickle.UnpicklingError, MemoryError):
            raise
        except Exception as error:  # raised by opcodes on an invalid stack
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def _load_build(self) -> None:
        if not is_dataclass(self.stack[-2]) or isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError(f"it sets the state of a {type(self.stack[-2]).__name__}")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]  # named otherwise in typeshed

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Others, as tuples in tuples, may take exponential time to be hashed.
            if not isinstance(getattr(key, "fqn", key), str) or not isinstance(getattr(key, "offset", None), OFFSET):
                raise pickle.UnpicklingError("it has keys of another type")
            self.stack[-1][key] = value

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if name in ALLOWED_CLASSES.get(module, ()) or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is not an allowed class")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration, which Python 3.11.2 stores as a call of ``getattr``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it calls getattr")


_Unpickler.dispatch = {
    **pickle._Unpickler.dispatch,
    pickle.BUILD[0]: _Unpickler._load_build,  # type: ignore[dict-item]
    pickle.SETITEM[0]: _Unpickler._load_setitem,  # type: ignore[dict-item]
    pickle.SETITEMS[0]: _Unpickler._load_setitems,  # type: ignore[dict-item]
}
# Metadata have no sets, and no arrays of bytes, which would be created before they are read, whatever their size.
for _opcode in (pickle.BYTEARRAY8, pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET):
    del _Unpickler.dispatch[_opcode[0]]
