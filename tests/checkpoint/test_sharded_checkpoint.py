import os
import pickle
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Script
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

from boltcutter.checkpoint import sharded_checkpoint as sharded
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_newest
from boltcutter.checkpoint.load import find_damage, load_checkpoint, read_metadata
from boltcutter.checkpoint.storage import CheckpointError

# Two ranks have a half each of a tensor, and the whole of another.
BEGIN = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from boltcutter.checkpoint import sharded_checkpoint as sharded
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointError
from boltcutter.checkpoint.load import read_metadata
dist.init_process_group("gloo")
mesh, path = init_device_mesh("cpu", (2,)), Path(sys.argv[1])
def checkpoint(step):
    cut = distribute_tensor(torch.arange(12.0).view(6, 2) * step, mesh, [Shard(0)])
    state = {"state": {0: {"momentum": cut, "step": torch.tensor(float(step))}}, "param_groups": [{"params": [0]}]}
    return {"state_dict": {"model.w": cut}, "optimizer_states": [state], "global_step": step}
"""
WHOLE = torch.arange(12.0).view(6, 2)


@pytest.fixture
def path(two_ranks: Script, tmp_path: Path) -> Path:
    """A checkpoint in two parts, of step 1."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    two_ranks(f"{BEGIN}\nAtomicCheckpointIO().save_sharded(checkpoint(1), path, {{}})", str(path))
    return path


def folder(path: Path) -> Path:
    found: Path = path.parent / read_metadata(path)["shards"]["folder"]
    return found


def test_shards_are_loaded_as_one_checkpoint(path: Path) -> None:
    assert sorted(file.name for file in folder(path).iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    found = load_checkpoint(path)
    assert found.keys() == {"state_dict", "optimizer_states", "global_step"}
    assert torch.equal(found["state_dict"]["model.w"], WHOLE)
    assert torch.equal(found["optimizer_states"][0]["state"][0]["momentum"], WHOLE)
    assert found["optimizer_states"][0]["state"][0]["step"] == 1
    assert found["optimizer_states"][0]["param_groups"] == [{"params": [0]}]
    assert read_metadata(path)["state_dict"]["model.w"].shape == WHOLE.shape  # without any part
    assert AtomicCheckpointIO().sharded_size(path) > 2 * WHOLE.nbytes


def test_a_kill_before_the_rename_keeps_the_previous_checkpoint(two_ranks: Script, path: Path) -> None:
    two_ranks(f"{BEGIN}\nsharded.save(checkpoint(2), path, {{}})", str(path))  # and no more
    assert len(list(path.parent.glob("last.ckpt.shards-*"))) == 2
    assert find_newest(path.parent) == str(path)
    assert torch.equal(load_checkpoint(path)["state_dict"]["model.w"], WHOLE)
    two_ranks(f"{BEGIN}\nAtomicCheckpointIO().save_sharded(checkpoint(3), path, {{}})", str(path))
    assert list(path.parent.glob("last.ckpt.shards-*")) == [folder(path)]
    assert torch.equal(load_checkpoint(path)["state_dict"]["model.w"], WHOLE * 3)


def test_a_single_file_replaces_shards_and_removes_them(path: Path) -> None:
    store = AtomicCheckpointIO()  # which removes only what is beside a checkpoint that it has saved
    store.save_checkpoint({"state_dict": {"model.w": WHOLE}}, path)
    assert os.listdir(path.parent) == ["last.ckpt"]
    store.remove_checkpoint(path)
    assert os.listdir(path.parent) == []


def test_damaged_or_missing_shards_are_detected_and_skipped(path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 0}, path.with_name("last-before.ckpt"))
    part = folder(path) / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert find_damage(path) == f"its shard {folder(path).name}/__1_0.distcp is damaged"
    warnings: list[str] = []
    assert find_newest(path.parent, warn=warnings.append) == str(path.with_name("last-before.ckpt"))
    assert [line.startswith(f"warning: {path}: {find_damage(path)}; ") for line in warnings] == [True, False]
    assert str(path.with_name("last-before.ckpt")) in warnings[1]  # which is used instead
    part.unlink()
    with pytest.raises(
        CheckpointError, match=re.escape(f"{path}: its shard {folder(path).name}/__1_0.distcp is missing")
    ):
        load_checkpoint(path)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


def test_metadata_is_never_executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    contents = folder(path) / ".metadata"
    contents.write_bytes(pickle.dumps(Evil()))
    index = read_metadata(path)
    index["shards"]["files"][".metadata"] = [contents.stat().st_size, sharded._checksum(contents)]
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file), keep=folder(path).name)
    with pytest.raises(CheckpointError, match="mkdir"):
        load_checkpoint(path)
    assert not Path("evil").exists()


def described_anew(path: Path, change: Callable[[Any, Path], None]) -> None:
    """Change the metadata of the shards, and update the checksums."""
    contents = folder(path) / ".metadata"
    metadata = pickle.loads(contents.read_bytes())
    change(metadata, folder(path))
    contents.write_bytes(pickle.dumps(metadata))
    index = read_metadata(path)
    for name in index["shards"]["files"]:
        file = folder(path) / name
        index["shards"]["files"][name] = [file.stat().st_size, sharded._checksum(file)]
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file), keep=folder(path).name)


def as_bytes(metadata: Any, where: Path) -> None:
    """A weight becomes a pickle, which torch's own planner executes."""
    torch.save(Evil(), where / "__0_0.distcp")
    info = _StorageInfo("__0_0.distcp", 0, (where / "__0_0.distcp").stat().st_size)
    metadata.state_dict_metadata["state_dict.model.w"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("state_dict.model.w")] = info


def elsewhere(metadata: Any, where: Path) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../{where.name}/{info.relative_path}"


@pytest.mark.parametrize(
    ("change", "message"),
    [(as_bytes, "not an allowed class"), (elsewhere, "is outside of its folder")],
)
def test_shards_of_other_types_or_folders_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Path], None], message: str
) -> None:
    monkeypatch.chdir(path.parent)
    described_anew(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
    assert not Path("evil").exists()


def test_values_other_than_tensors_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setitem(
        sharded.ALLOWED_CLASSES,
        "torch.distributed.checkpoint.metadata",
        sharded.ALLOWED_CLASSES["torch.distributed.checkpoint.metadata"] | {"BytesStorageMetadata"},
    )
    described_anew(path, as_bytes)
    with pytest.raises(CheckpointError, match=r"state_dict\.model\.w "):
        load_checkpoint(path)
    with pytest.raises(pickle.UnpicklingError):
        sharded._planner().load_bytes(SimpleNamespace(dest_index=MetadataIndex("w")), BytesIO())
    assert not Path("evil").exists()


@pytest.mark.parametrize("module", ["torch", "pathlib", "torch.distributed.checkpoint.metadata"])
def test_the_state_of_other_classes_than_dataclasses_is_not_set(module: str) -> None:
    name = sorted(sharded.ALLOWED_CLASSES[module])[0]
    attack = b"c" + f"{module}\n{name}\n".encode() + b"}X\x01\x00\x00\x00aK\x01sb."  # sets an attribute of the class
    with pytest.raises(pickle.UnpicklingError, match="it sets the state of a"):
        sharded._Unpickler(BytesIO(attack)).load()


ENDLESS = b")" + b"2\x86" * 60  # (t, t) sixty times, whose hash is that of 2**60 tuples
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}(X\x03\x00\x00\x00fqn"


@pytest.mark.parametrize(
    "attack",
    [
        b"}" + ENDLESS + b"K\x01s",
        b"}(" + ENDLESS + b"K\x01u",
        b"(" + ENDLESS + b"K\x01d",
        b"\x8f(" + ENDLESS + b"\x90",
        b"(" + ENDLESS + b"\x91",
        b"}" + INDEX + ENDLESS + b"ubK\x01s",
        b"}" + INDEX + b"X\x01\x00\x00\x00wX\x06\x00\x00\x00offset" + ENDLESS + b"ubK\x01s",
    ],
)
def test_keys_that_take_forever_are_refused(attack: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        sharded._Unpickler(BytesIO(b"\x80\x02" + attack + b".")).load()


def nested(count: int = 60) -> Any:
    value: tuple[Any, ...] = ()
    for _ in range(count):
        value = value, value
    return value


def far(metadata: Any, where: Path) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = nested()


def without_paths(metadata: Any, where: Path) -> None:
    metadata.storage_data = dict.fromkeys(metadata.storage_data, nested())


@pytest.mark.parametrize("change", [far, without_paths])
def test_paths_of_another_type_are_not_shown(path: Path, change: Callable[[Any, Path], None]) -> None:
    described_anew(path, change)
    with pytest.raises(CheckpointError, match="a shard is outside of its folder"):
        load_checkpoint(path)


def test_metadata_of_another_type_are_refused(path: Path) -> None:
    contents, index = folder(path) / ".metadata", read_metadata(path)
    contents.write_bytes(pickle.dumps(torch.Size([1])))
    index["shards"]["files"][".metadata"] = [contents.stat().st_size, sharded._checksum(contents)]
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file), keep=folder(path).name)
    with pytest.raises(CheckpointError, match="its metadata has another type"):
        load_checkpoint(path)


def test_a_shard_file_elsewhere_is_refused(path: Path) -> None:
    index = read_metadata(path)
    index["shards"]["files"][f"../{folder(path).name}/.metadata"] = index["shards"]["files"][".metadata"]
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file), keep=folder(path).name)
    with pytest.raises(CheckpointError, match="is outside of its folder"):
        load_checkpoint(path)


def test_a_file_that_is_not_listed_is_not_opened(path: Path) -> None:
    """Nobody has verified it, and it may block for ever."""
    for name in ("__0_0.distcp", ".metadata"):
        index = read_metadata(path)
        del index["shards"]["files"][name]
        AtomicCheckpointIO()._write(path, lambda file, index=index: torch.save(index, file), keep=folder(path).name)
        (folder(path) / name).unlink()
        os.mkfifo(folder(path) / name)
        with pytest.raises(CheckpointError, match="a shard is not in its list of shards"):
            load_checkpoint(path)


def test_tensors_that_are_larger_than_their_shards_are_refused(path: Path) -> None:
    index = read_metadata(path)
    index["state_dict"] = {"model.w": torch.empty(10**6, 10**6, device="meta")}
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file), keep=folder(path).name)
    with pytest.raises(CheckpointError, match="its tensors are larger than its shards"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.", b"\x80\x02.", b""])
def test_metadata_that_is_damaged_ends_in_one_line(path: Path, content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        sharded._Unpickler(BytesIO(content)).load()


@pytest.mark.parametrize(
    "change",
    [
        lambda shards: 5,
        lambda shards: None,
        lambda shards: {"folder": shards["folder"], "orders": {}},
        lambda shards: shards | {"files": list(shards["files"])},
        lambda shards: shards | {"files": dict.fromkeys(shards["files"], 3)},
        lambda shards: shards | {"files": {name: [size] for name, (size, _) in shards["files"].items()}},
        lambda shards: shards | {"files": {5: [1, 2]}},
        lambda shards: shards | {"folder": 5},
        lambda shards: shards | {"orders": {"state_dict.0.weight": [1, 0]}},
        lambda shards: shards | {"orders": None},
    ],
)
def test_an_entry_of_shards_of_another_form_is_refused(path: Path, change: Callable[[Any], Any]) -> None:
    index = torch.load(path, weights_only=True)
    torch.save(index | {"shards": change(index["shards"])}, path)
    assert find_damage(path) == "its list of shards has another form than those that are written"
    with pytest.raises(CheckpointError, match="another form"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "..", ""])
def test_a_shard_folder_elsewhere_is_refused(path: Path, name: str) -> None:
    index = read_metadata(path)
    folder(path).rename(path.parent.parent / "outside")
    index["shards"]["folder"] = name
    AtomicCheckpointIO()._write(path, lambda file: torch.save(index, file))
    with pytest.raises(CheckpointError, match="outside"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="outside"):
        sharded.load_into(path, index, {}, alone=False)


def test_permuted_rows_are_restored(two_ranks: Script, tmp_path: Path) -> None:
    code = 'order = torch.tensor([1, 0, 3, 2, 5, 4])\norders = {"state_dict.model.w": order}\n'
    two_ranks(f"{BEGIN}\n{code}AtomicCheckpointIO().save_sharded(checkpoint(1), path, orders)", f"{tmp_path}/last.ckpt")
    assert torch.equal(load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["model.w"], WHOLE[[1, 0, 3, 2, 5, 4]])


def test_a_write_error_of_one_rank_is_reported_by_all(two_ranks: Script, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
try:
    AtomicCheckpointIO().save_sharded(checkpoint(1), path, {})
except CheckpointError as error:
    print(error)
"""
    stdout = two_ranks(BEGIN + code, str(tmp_path / "file" / "last.ckpt")).stdout
    assert stdout.count("last.ckpt: not written (rank 0: [Errno 20]") == 2
    at_once = BEGIN.replace("Path(sys.argv[1])", "sys.argv[1]") + "from boltcutter.checkpoint import storage\n"
    stdout = two_ranks(f"{at_once}storage.RETRY_SECONDS = 0.0\n{code}", "s4://bucket/last.ckpt").stdout
    assert stdout.count("last.ckpt: not written (rank 0: Protocol not known: s4); the previous checkpoint is ") == 2


class Member:
    """Pickled as Python 3.11.2 does members of an enumeration."""

    def __init__(self, kind: object, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_members_of_enumerations_of_an_earlier_python_are_read() -> None:
    def read(value: object) -> Any:
        return sharded._Unpickler(BytesIO(pickle.dumps(value, protocol=4))).load()

    kind = _MEM_FORMAT_ENCODING
    assert read(Member(kind, "TORCH_CHANNELS_LAST")) is kind.TORCH_CHANNELS_LAST
    for wrong in (Member(kind, "__class__"), Member(torch.Size, "count"), Member("text", "upper")):
        with pytest.raises(pickle.UnpicklingError, match="calls getattr"):
            read(wrong)
