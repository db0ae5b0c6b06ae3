"""Checkpoints of several files: each rank writes its part into a folder, and then a file names the folder.

``last.ckpt`` is that file: all of the checkpoint but the numbers of weights and optimizer state, of which it has names,
shapes and types. These are beside it in ``last.ckpt.shards-<name>``, in the form of ``torch.distributed.checkpoint``.
Parts get a new folder each time and the file comes last, in one step: until then what was there before is whole.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boltcutter.atomic import fsync_folder
from boltcutter.storage import CheckpointError

SHARDED_KEYS = ("state_dict", "optimizer_states")  # of a checkpoint, what ranks have parts of
ALLOWED_CLASSES = {  # all that a list of contents is made of
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def save(checkpoint: dict[str, Any], path: str | Path, orders: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Write a checkpoint's parts, on all ranks.

    Args:
        checkpoint: Its tensors may be ``DTensor``s.
        path: Of the file that is to name them.
        orders: By name (``state_dict.model.weight``) of which rows a tensor is made, where that is not 0, 1, 2, …

    Returns:
        What belongs into that file, on the first rank.

    Raises:
        OSError: A rank could not write its part.
        CheckpointError: The path is a URL.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

    if "://" in str(path):
        raise CheckpointError(f"{path}: parts go to a folder that all ranks see; say checkpoints=<folder>")
    rank = dist.get_rank()
    tensors: dict[str, Tensor] = {}
    index = {key: _hollow(value, key, tensors) if key in SHARDED_KEYS else value for key, value in checkpoint.items()}
    name = [secrets.token_hex(4)]
    dist.broadcast_object_list(name)
    folder = Path(f"{path}.shards-{name[0]}")
    with _first_failure():
        save_sharded(tensors, storage_writer=FileSystemWriter(folder))
    mine = [file for file in sorted(folder.iterdir()) if _belongs(file.name, rank)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {file.name: [file.stat().st_size, _checksum(file)] for file in mine})
    if rank:
        return None
    _sync(folder)
    files = {name: known for some in everyone for name, known in some.items()}
    return index | {"shards": {"folder": folder.name, "files": files, "orders": dict(orders)}}


def find_damage(path: Path, index: Mapping[str, Any]) -> str | None:
    """What is wrong with the parts that the file ``path`` names; None if nothing is, or it names none."""
    if "shards" not in index:
        return None
    parts = index["shards"]
    if odd := [name for name in (parts["folder"], *parts["files"]) if not _is_plain_name(name)]:
        return f"its part {odd[0]!r} lies elsewhere"
    for name, (size, checksum) in parts["files"].items():
        file = path.parent / parts["folder"] / name
        if not file.is_file():
            return f"its part {parts['folder']}/{name} is missing"
        if file.stat().st_size != size or _checksum(file) != checksum:
            return f"damaged at its part {parts['folder']}/{name}"
    return None


def load_into(path: Path, index: dict[str, Any], into: dict[str, Tensor], *, alone: bool) -> None:
    """Fill tensors by name; of a ``DTensor`` this rank's part. Others get their rows in order.

    Args:
        path: Of the file.
        index: What it holds.
        into: Are filled.
        alone: Whether other ranks, if there are any, read nothing now.

    Raises:
        CheckpointError: The parts cannot be read, or are more than data.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process.*")
        try:
            with _first_failure():
                load(into, storage_reader=_reader(path, index), planner=_planner(), no_dist=alone)
        except (OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: its parts are not read ({error}); take another checkpoint") from error
    for name, order in index["shards"]["orders"].items():
        if name in into:
            into[name].copy_(into[name][order.argsort()])


def load_full(path: Path, index: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with all its tensors, as one process would have written it; as it is if it names no parts.

    Raises:
        CheckpointError: A part is missing, damaged, or more than data.
    """
    if "shards" not in index:
        return index
    if why := find_damage(path, index):
        raise CheckpointError(f"{path}: {why}; take another checkpoint")
    tensors: dict[str, Tensor] = {}
    found = {key: _filled(value, key, tensors) if key in SHARDED_KEYS else value for key, value in index.items()}
    load_into(path, index, tensors, alone=True)
    del found["shards"]
    return found


def size(path: Path) -> int:
    """Bytes of all parts that are there."""
    return sum(file.stat().st_size for folder in _folders(path) for file in folder.iterdir())


def remove_stale(path: Path, keep: str | None = None) -> None:
    """Remove parts that belong to ``path`` no longer: all but the folder ``keep``."""
    for folder in _folders(path):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(path: Path) -> list[Path]:
    start = f"{path.name}.shards-"
    return [f for f in path.parent.iterdir() if f.name.startswith(start)] if path.parent.is_dir() else []


def _hollow(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` with tensors that have no numbers; those that have go to ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _hollow(inner, f"{name}.{key}", tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hollow(inner, f"{name}.{place}", tensors) for place, inner in enumerate(value))
    return value


def _filled(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The contrary: ``value`` with room for numbers, which is also in ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = torch.empty(value.shape, dtype=value.dtype)
        return tensors[name]
    if isinstance(value, Mapping):
        return {key: _filled(inner, f"{name}.{key}", tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(inner, f"{name}.{place}", tensors) for place, inner in enumerate(value))
    return value


def _belongs(name: str, rank: int) -> bool:
    """Whether a rank has written a file."""
    return name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))


def _checksum(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _sync(folder: Path) -> None:
    """Have the names on the disk: of the files, and of the folder."""
    for place in (folder, folder.parent):
        fsync_folder(place)


@contextmanager
def _first_failure() -> Iterator[None]:
    """What any of the ranks failed with.

    Raises:
        OSError: In place of torch's own error, which is no ``Exception``.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {why}") from why


def _reader(path: Path, index: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    name = index["shards"]["folder"]
    if not _is_plain_name(name):
        raise pickle.UnpicklingError(f"{name!r} lies elsewhere")
    folder = path.parent / name
    found: Metadata = _Unpickler(BytesIO((folder / ".metadata").read_bytes())).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError("its list of contents is none")
    for name, kind in found.state_dict_metadata.items():
        if type(kind) is not TensorStorageMetadata:  # torch would unpickle it, and run its code
            raise pickle.UnpicklingError(f"{name} is no tensor")
    for info in (found.storage_data or {}).values():
        if not _is_plain_name(getattr(info, "relative_path", None)):
            raise pickle.UnpicklingError(f"{getattr(info, 'relative_path', info)!r} lies elsewhere")
    found.storage_meta = found.storage_meta or StorageMeta()

    class Reader(FileSystemReader):
        """Torch's own would run whatever code a list of contents holds."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return found

    return Reader(folder)


def _planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        """Torch's own would unpickle what is no tensor."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")

    return Planner()


def _is_plain_name(name: Any) -> bool:
    """Whether a name leads to no other folder."""
    return isinstance(name, str) and "/" not in name and "\\" not in name and name not in ("", ".", "..")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if name in ALLOWED_CLASSES.get(module, ()) or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
