import os
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter import files

OTHER = 54321  # a user of nobody here


def append(folder: Path, name: str, mode: str = "a") -> None:
    with open(folder / name, mode, opener=files.opener(folder)) as file:
        file.write("text")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "outside").write_text("precious")
    return tmp_path / "run"


def test_files_of_the_run_are_written(run: Path) -> None:
    for mode, text in (("a", "text"), ("a", "texttext"), ("w", "text")):
        append(run, "logs/rank-0.log", mode)
        assert (run / "logs" / "rank-0.log").read_text() == text
    assert (run / "logs" / "rank-0.log").stat().st_mode & 0o111 == 0


@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "dangling"])
def test_a_file_that_leads_elsewhere_is_not_written(run: Path, kind: str, mode: str) -> None:
    place = run / "logs" / "rank-0.log"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "hard link":
        place.hardlink_to(run.parent / "outside")
    else:
        place.symlink_to(run.parent / ("outside" if kind == "link" else "missing"))
    with pytest.raises(OSError, match=r"rank-0\.log"):
        append(run, "logs/rank-0.log", mode)
    assert (run.parent / "outside").read_text() == "precious"
    assert not (run.parent / "missing").exists()


def test_a_path_outside_of_the_folder_is_not_opened(run: Path) -> None:
    for name in ("../outside", "logs/../../outside", str(run.parent / "outside")):
        with pytest.raises(OSError, match="not in the folder of the run"):
            append(run, name)


def test_only_links_of_the_user_lead_to_other_folders(run: Path) -> None:
    (run / "logs").rmdir()
    (run.parent / "disk").mkdir()
    (run / "logs").symlink_to("../disk")
    append(run, "logs/rank-0.log")
    assert (run.parent / "disk" / "rank-0.log").read_text() == "text"
    if os.geteuid() == 0:
        os.lchown(run / "logs", OTHER, OTHER)
        with pytest.raises(OSError, match="link of another user"):
            append(run, "logs/rank-0.log")


def test_a_folder_is_ours_unless_others_own_or_write_it(tmp_path: Path) -> None:
    ours = os.stat_result([0o40755, 1, 1, 1, os.geteuid(), os.getegid(), 0, 0, 0, 0])

    def facts(mode: int, user: int = os.geteuid(), group: int = OTHER) -> os.stat_result:
        return os.stat_result([mode, 1, 1, 1, user, group, 0, 0, 0, 0])

    assert files.is_ours(ours)
    assert files.is_ours(facts(0o100644))
    assert files.is_ours(facts(0o100644, user=0))
    assert not files.is_ours(facts(0o100664))  # of a group that others are in
    assert not files.is_ours(facts(0o100646))
    assert not files.is_ours(facts(0o100644, user=OTHER))
    assert files.is_ours(facts(0o120777))  # a link


def test_the_first_link_of_another_user_on_the_way_is_found(tmp_path: Path, hand_over: Callable[[Path], None]) -> None:
    (tmp_path / "disk" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "own").symlink_to("disk")
    (tmp_path / "theirs").symlink_to(tmp_path / "own" / "runs")
    (tmp_path / "circle").symlink_to("circle")
    assert files.foreign_link(tmp_path / "theirs" / "a" / "missing") is None
    with pytest.raises(OSError, match="circle"):
        files.foreign_link(tmp_path / "circle")
    hand_over(tmp_path / "theirs")
    assert files.foreign_link(tmp_path / "theirs" / "a") == str(tmp_path / "theirs")


def test_a_folder_in_place_of_a_link_of_somebody_else_is_not_emptied(
    run: Path, hand_over: Callable[[Path], None]
) -> None:
    """Also if the link is made after it was looked for."""
    kept = run.parent / "elsewhere" / "onnx"
    kept.mkdir(parents=True)
    (kept / "model.onnx").write_text("precious")
    files.make_empty(run, run / "export" / "onnx")
    (run / "export" / "onnx" / "model.onnx").write_text("old")
    files.make_empty(run, run / "export" / "onnx")
    assert list((run / "export" / "onnx").iterdir()) == []
    (run / "export" / "onnx").rmdir()
    (run / "export").rmdir()
    (run / "export").symlink_to(kept.parent)
    hand_over(run / "export")
    with pytest.raises(OSError, match="export"):
        files.make_empty(run, run / "export" / "onnx")
    assert (kept / "model.onnx").read_text() == "precious"
