import html
import os
import re
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Browse

from boltcutter.report import page as report
from boltcutter.report.media import MediaError, discard_after, read_media, render_media, write_images, write_table


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    for name in ("val/samples", "../../a", "/etc/b", "..", "", "x:y*z", "c" * 999):
        write_images(tmp_path / "run", name, torch.zeros(2, 2), 3)
    written = {path.relative_to(tmp_path / "run" / "media").as_posix() for path in tmp_path.rglob("*.png")}
    assert {"val/samples/3.png", "a/3.png", "etc/b/3.png", "unnamed/3.png", "x_y_z/3.png"} < written
    assert len(written) == len(list(tmp_path.rglob("*.*"))) == 6


def test_a_step_is_replaced_and_later_ones_are_discarded(tmp_path: Path) -> None:
    for step in (0, 5, 10, 15):
        write_images(tmp_path, "a", torch.full((2, 2), step / 15), step)
        write_table(tmp_path, "b", ["x"], [[step]], None, step)
    write_images(tmp_path, "a", torch.ones(4, 4), 5)
    discard_after(tmp_path, 10)
    media = {entry["name"]: entry for entry in read_media(tmp_path)}
    assert [frame["step"] for frame in media["a"]["frames"]] == [0, 5, 10]
    assert [frame["rows"] for frame in media["b"]["frames"]] == [[["x"], [str(step)]] for step in (0, 5, 10)]


def test_tables_have_columns_or_a_frame(tmp_path: Path) -> None:
    write_table(tmp_path, "a", ["name", "p"], [["one, two", torch.tensor(0.5)], ["b\nc", 1]], None, 0)
    write_table(tmp_path, "b", None, None, pd.DataFrame({"name": ["one"], "p": [0.5]}), 0)
    assert pd.read_csv(tmp_path / "media/a/0.csv").to_numpy().tolist() == [["one, two", 0.5], ["b\nc", 1.0]]
    assert pd.read_csv(tmp_path / "media/b/0.csv").to_numpy().tolist() == [["one", 0.5]]


def test_a_report_shows_evenly_spaced_steps(tmp_path: Path) -> None:
    for step in range(0, 500):
        write_table(tmp_path / "evaluation" / "test", "a", ["x"], [[step]] * 30, None, step)
    (entry,) = read_media(tmp_path)
    steps = [frame["step"] for frame in entry["frames"]]
    assert (entry["name"], entry["of"], len(steps), steps[0], steps[-1]) == ("evaluation/test/a", 500, 100, 0, 499)
    assert max(np.diff(steps)) <= 6
    assert (len(entry["frames"][0]["rows"]), entry["frames"][0]["of"]) == (21, 30)


def test_a_report_of_large_pictures_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boltcutter.report.media.MAX_BYTES", 1600)
    for step in range(9):
        write_images(tmp_path, "a", torch.rand(20, 20, generator=torch.Generator().manual_seed(step)), step)
    assert [frame["step"] for frame in read_media(tmp_path)[0]["frames"]] == [0, 4, 8]


@pytest.mark.parametrize("name", ["0.png", "0.csv"])
def test_a_fifo_of_somebody_else_does_not_block(tmp_path: Path, name: str) -> None:
    (tmp_path / "media" / "a").mkdir(parents=True)
    os.mkfifo(tmp_path / "media" / "a" / name)
    signal.alarm(20)
    with pytest.raises(ValueError, match="not an ordinary file"):
        read_media(tmp_path)
    signal.alarm(0)


@pytest.mark.parametrize("images", [[], torch.zeros(2, 3, 5), [torch.zeros(2, 2), "no picture"]])
def test_a_mistake_names_the_picture(images: object, tmp_path: Path) -> None:
    with pytest.raises((MediaError, FileNotFoundError), match=r"val/x|no picture"):
        write_images(tmp_path, "val/x", images, 0)
    assert not list(tmp_path.rglob("*.png"))


EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def run_folder(folder: Path) -> Path:
    (folder / "record.json").write_text("{}")
    return folder


def test_a_run_without_media_has_no_section(tmp_path: Path) -> None:
    assert render_media(run_folder(tmp_path) / "record.json") == ""
    assert "Pictures and tables" not in report.render_page(tmp_path)


SLIDE = """
const input = document.querySelector('.media input'), frames = [...input.closest('figure').querySelectorAll('.frame')];
const shown = () => frames.map(frame => frame.hidden ? 0 : +frame.dataset.step).join();
const seen = [shown(), input.ariaValueText];
input.focus(); input.stepDown(); input.dispatchEvent(new Event('input'));
seen.push(shown(), input.ariaValueText, input.closest('figure').querySelector('output').textContent);
seen.push(document.activeElement === input);
document.title = JSON.stringify(seen);
"""


def test_pictures_are_shown_by_step(browse: Browse, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    for step in (100, 200, 300):
        write_images(run, "val/<samples>", np.full((3, 8, 8), step / 300), step)
        write_table(run, "words", ["word", "p"], [[EVIL, step]] * 50, None, step)
    write_images(run / "evaluation" / "test", "once", np.zeros((8, 8)), 0)
    seen = browse(report.write_page(run), script=SLIDE)
    assert seen.console == []
    assert [html.unescape(text) for text in re.findall(r"<title>(.*?)</title>", seen.dom)] == [
        '["0,0,300","step 300","0,200,0","step 200","step 200",true]'
    ]
    assert (seen.count('type="range"'), seen.count('class="sheet media"')) == (2, 3)  # a single step has no slider
    assert 'alt="val/_samples_ at step 200"' in seen.dom
    assert "20 of 50 rows" in seen.dom
    assert seen.count('<img [^>]*class="small"') == 4  # all of them are enlarged, those of other steps too


@pytest.mark.parametrize("scheme", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_pictures_are_legible_in_both_color_schemes(scheme: str, browse: Browse, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    write_images(run, "figure", np.zeros((4, 8, 8), np.uint8), 0)
    show = "document.title = getComputedStyle(document.querySelector('.media img')).backgroundColor"
    seen = browse(report.write_page(run), f"--blink-settings=preferredColorScheme={scheme}", script=show)
    assert "<title>rgb(255, 255, 255)</title>" in seen.dom  # transparent figures have black text
