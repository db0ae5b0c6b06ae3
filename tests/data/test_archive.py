import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from boltcutter.data.archive import TarShard


def write(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, contents in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
    return path


def npy(values: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values))
    return file.getvalue()


def test_samples_are_found_by_their_key_in_any_order(tmp_path: Path) -> None:
    members = {"x/b.cls": b"2", "README": b"words", "x/a.npy": npy([1, 2]), "x/b.npy": npy([3, 4]), "x/a.cls": b"1\n"}
    archive = TarShard(write(tmp_path / "a.tar", members), (2,), tmp_path / "index")
    for opened in (archive, pickle.loads(pickle.dumps(archive)), TarShard(archive.path, (2,), tmp_path / "index")):
        inputs, targets = opened.rows(np.array([1, 0, 1]))
        assert inputs.tolist() == [[3, 4], [1, 2], [3, 4]]
        assert targets.tolist() == [2, 1, 2]


def test_another_file_of_the_same_name_is_looked_up_again(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"a.npy": npy([1]), "a.cls": b"1"})
    TarShard(tmp_path / "a.tar", (1,), tmp_path / "index")
    write(tmp_path / "a.tar", {f"{n}.{e}": c for n in range(30) for e, c in (("npy", npy([n])), ("cls", b"1"))})
    assert len(TarShard(tmp_path / "a.tar", (1,), tmp_path / "index")) == 30


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.npy": npy([1])}, r"a.tar: a has no class \(.cls\); write the file again"),
        ({"b/a.cls": b"1"}, r"a.tar: b/a has no input \(npy, png, jpg, jpeg\)"),
        ({"a.npy": npy([1]), "a.cls": b"one"}, r"a.tar: not a valid tar file of samples \(invalid literal for int"),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TarShard(write(tmp_path / "a.tar", members), (1,), tmp_path)


def test_damage_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.cls": b"1", "a.npy": npy(np.zeros(5000))})
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"a.tar: not a valid tar file of samples \(.*\); replace it"):
        TarShard(path, (5000,), tmp_path)
    path.write_bytes(b"no tar file at all" * 100)
    with pytest.raises(ValueError, match=r"a.tar: not a valid tar file of samples \(.*\); replace it"):
        TarShard(path, (5000,), tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"words", "a.npy is not a valid .npy file: .*"),
        (npy([1, 2])[:-1], "a.npy is truncated"),
        (
            npy(np.asfortranarray(np.zeros((2, 3)))),
            "a.npy has float64 in Fortran order; numbers in C order",
        ),
        (npy(["a"]), "a.npy has <U1 in C order"),
    ],
)
def test_a_damaged_sample_is_told(tmp_path: Path, contents: bytes, message: str) -> None:
    inner = write(tmp_path / "b.tar", {"a.npy": contents, "a.cls": b"1"})
    with pytest.raises(ValueError, match=rf"b.tar: not a valid tar file of samples \({message}.*\); replace it"):
        TarShard(inner, (1,), tmp_path)


def test_samples_of_several_kinds_keep_their_numbers(tmp_path: Path) -> None:
    kinds = [np.uint8, np.float32, np.int64, np.float32]
    members = {f"{n}.npy": npy(np.array([n, 3], kind)) for n, kind in enumerate(kinds)}
    archive = TarShard(write(tmp_path / "a.tar", members | {f"{n}.cls": b"1" for n in range(4)}), (2,), tmp_path)
    assert archive.rows(np.arange(4))[0].tolist() == [[n, 3] for n in range(4)]
    assert archive.rows(np.array([3, 1]))[0].dtype == np.float32
