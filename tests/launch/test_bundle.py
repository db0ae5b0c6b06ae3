import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch import bundle
from boltcutter.launch.bundle import check_size, pack, unpack

from .test_library import git


def run_folder(place: Path) -> Path:
    """A launched run whose code has a program, a link in the code and a link to a large file elsewhere."""
    folder = place / "run"
    (folder / "code" / "src").mkdir(parents=True)
    (folder / "code" / "src" / "a.py").write_text("a = 1\n")
    (folder / "code" / "run.sh").write_text("exit 3\n")
    (folder / "code" / "run.sh").chmod(0o755)
    (folder / "code" / "b.py").symlink_to("src/a.py")
    (place / "large").write_bytes(b"large")
    (folder / "code" / "large").symlink_to(place / "large")
    (folder / "record.json").write_text("{}")
    (folder / "metrics.csv").write_text("step\n")
    return folder


def test_a_bundle_holds_code_and_record(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    first = pack(folder).read_bytes()
    os.utime(folder / "code" / "run.sh", (1, 1))
    assert pack(folder).read_bytes() == first  # the same content
    there = tmp_path / "there"
    unpack(folder / "job.tar.gz", there)
    found = {str(file.relative_to(there)) for file in there.rglob("*") if not file.is_dir()}
    assert found == {"record.json", "code/b.py", "code/large", "code/run.sh", "code/src/a.py"}
    assert os.access(there / "code" / "run.sh", os.X_OK)
    assert (there / "code" / "b.py").is_symlink()
    assert (there / "code" / "b.py").read_text() == "a = 1\n"
    assert not (there / "code" / "large").is_symlink()
    assert (there / "code" / "large").read_bytes() == b"large"


@pytest.mark.filterwarnings("ignore:Python 3.14 will")  # of tarfile in Python 3.12 and 3.13
@pytest.mark.parametrize("is_old", [False, True], ids=["filter", "no filter"])
def test_a_bundle_cannot_write_elsewhere(is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_old:  # Python before 3.10.12 and 3.11.4
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    evil: list[dict[str, str]] = [{"../evil": ""}, {"/evil": ""}, {"link": "../evil"}, {"link": "/etc"}]
    evil += [{"a/b/up": "../..", "a/b/up/link": "../x"}]
    for number, entries in enumerate(evil):
        if not is_old and "/evil" in entries:  # the filter extracts it inside
            continue
        with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
            for name, target in entries.items():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
                archive.addfile(info, io.BytesIO())
        with pytest.raises(ValueError, match="cannot be unpacked"):
            unpack(tmp_path / "evil.tar.gz", tmp_path / "there" / str(number))
    assert not (tmp_path / "there" / "evil").exists()


@pytest.mark.filterwarnings("ignore:Python 3.14 will")
def test_an_old_tarfile_unpacks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = pack(run_folder(tmp_path / "run"))
    found = []
    for name in ("new", "old"):
        unpack(bundle, tmp_path / name)
        files = sorted((tmp_path / name).rglob("*"))
        found.append(
            [(str(file.relative_to(tmp_path / name)), file.stat().st_mode, file.is_symlink()) for file in files]
        )
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    assert found[0] == found[1]


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.tar.gz"
    content = pack(run_folder(tmp_path)).read_bytes()
    for packed in (content, lzma.compress(gzip.decompress(content))):
        damaged.write_bytes(packed)
        unpack(damaged, tmp_path / "there")
        for content in (packed[:200], gzip.compress(b"x" * 1000)):
            damaged.write_bytes(content)
            with pytest.raises(ValueError, match=r"damaged\.tar\.gz: cannot be unpacked") as error:
                unpack(damaged, tmp_path / "elsewhere")
            assert "\n" not in str(error.value)


def test_large_files_are_listed(tmp_path: Path) -> None:
    for name, size in {"data/images.npy": 3_000_000, "weights.pt": 2_000_000, "a.py": 10, "b.py": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    check_size(tmp_path, tmp_path / "runs", 6)
    with pytest.raises(ValueError, match=r"launch\.max_code_mb=4: the project's files have 5\.0 MB; ") as error:
        check_size(tmp_path, tmp_path / "runs", 4)
    assert "data/images.npy (3.0 MB), weights.pt (2.0 MB), a.py (0.0 MB); have git ignore data" in str(error.value)


@pytest.mark.parametrize("is_old", [False, True], ids=["filter", "no filter"])
@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.LNKTYPE], ids=["fifo", "device", "link"])
def test_a_bundle_has_only_files_folders_and_links(
    is_old: bool, kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "secret").write_text("")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("entry")
        info.type, info.linkname = kind, str(tmp_path / "secret")
        archive.addfile(info)
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(tmp_path / "evil.tar.gz", tmp_path / "there")


@pytest.mark.parametrize("module", [gzip, lzma])
def test_a_bundle_that_expands_to_any_size_is_refused(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MIN_LIMIT", 1 << 16)
    (tmp_path / "job.tar.gz").write_bytes(module.compress(bytes(1 << 22)))
    with pytest.raises(ValueError, match="it has more than 0 MiB"):
        unpack(tmp_path / "job.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()
