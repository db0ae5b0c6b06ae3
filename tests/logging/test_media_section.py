import html
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browse

from boltcutter.report import html as report
from boltcutter_logging.media import write_images, write_table
from boltcutter_logging.media_section import render

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def run_folder(folder: Path) -> Path:
    (folder / "record.json").write_text("{}")
    return folder


def test_a_run_without_media_has_no_section(tmp_path: Path) -> None:
    assert render(run_folder(tmp_path) / "record.json") == ""
    assert "Pictures and tables" not in report.render(tmp_path)


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
        write_images(run, "val/<samples>", np.full((3, 8, 8), step / 300), step, ["a", EVIL])
        write_table(run, "words", ["word", "p"], [[EVIL, step]] * 50, None, step)
    write_images(run / "evaluation" / "test", "once", np.zeros((8, 8)), 0)
    seen = browse(report.write(run), script=SLIDE)
    assert seen.console == []
    assert [html.unescape(text) for text in re.findall(r"<title>(.*?)</title>", seen.dom)] == [
        '["0,0,300","step 300","0,200,0","step 200","step 200",true]'
    ]
    assert (seen.count('type="range"'), seen.count('class="sheet media"')) == (2, 3)  # a single step has no slider
    assert 'alt="val/_samples_ at step 200: a' in seen.dom
    assert "20 of 50 rows" in seen.dom
    assert seen.count('<img [^>]*class="small"') == 4  # all of them are enlarged, those of other steps too


@pytest.mark.parametrize("scheme", ["0", "1"])
def test_pictures_are_legible_in_both_color_schemes(scheme: str, browse: Browse, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    write_images(run, "figure", np.zeros((4, 8, 8), np.uint8), 0)
    show = "document.title = getComputedStyle(document.querySelector('.media img')).backgroundColor"
    seen = browse(report.write(run), f"--blink-settings=preferredColorScheme={scheme}", script=show)
    assert "<title>rgb(255, 255, 255)</title>" in seen.dom  # transparent figures have black text
