"""The page about many runs, rendered by a real browser."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import Browse, References

from boltcutter.analysis import live, query
from boltcutter.analysis.page import MAX_POINTS, collect, write_table
from boltcutter.analysis.record import find_runs
from boltcutter.cli import commands

from .conftest import Write

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LIST = """
  const list = text => {
    document.body.append(Object.assign(document.createElement('p'), {className: 'said', textContent: text}));
  };
  const shown = () => [...document.querySelectorAll('#runs tbody tr')].filter(row => !row.hidden);
  const rows = () => list(shown().map(row => row.dataset.run).join(' '));
  const check = id => document.querySelector(`tr[data-run="${id}"] input`).click();
  const header = title => [...document.querySelectorAll('#runs th')].find(th => th.textContent === title);
  const settle = drawAll;  // as the next frame does
  const curves = () => list(document.querySelectorAll('[data-curves] .curve').length);
  const type = text => { const box = document.querySelector('#runs input'); box.value = text; box.oninput(); };"""

KEYS_ON_CURVES = """
      const said = () => list([...tip.children].slice(0, 2).map((row, i) => row.children[i].textContent).join(' '));
      const again = () => document.querySelector('[data-curves] svg');
      const go = key => again().dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
      go('ArrowRight'); said(); go('ArrowRight'); said(); go('ArrowUp'); said();"""


def fill(root: Path, write: Write, count: int, points: int = 30, **facts: Any) -> Path:
    for number in range(count):
        rate = 10 ** -(1 + number % 4)
        settings = {"optimizer": {"lr": rate}, "seed": number, "choices": {"model": ["mlp", "convnet"][number % 2]}}
        metrics = {"val/accuracy": 0.5 + number / count / 2, "val/loss": 1.0}
        folder = write(root / f"{number:04}", day=number % 28 + 1, settings=settings, metrics=metrics, **facts)
        lines = [f"{10 * n},{n // 10},{1 - math.exp(-n / 9) * rate},{2 / (n + 1)}\n" for n in range(points)]
        (folder / "metrics.csv").write_text("step,epoch,val/accuracy,train/loss\n" + "".join(lines))
    return root


def said(dom: str) -> list[str]:
    return re.findall(r'<p class="said">(.*?)</p>', dom)


def read_data(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


def make(tmp_path: Path, write_run: Write, count: int, **facts: Any) -> Path:
    root = fill(tmp_path / "runs", write_run, count, **facts)
    return write_table(find_runs(root), tmp_path / "page.html", "runs")


def numbers(texts: Sequence[str]) -> list[int]:
    return [int(text) for text in texts]


def test_all_parts_are_drawn_and_nothing_is_loaded(browse: Browse, tmp_path: Path, write: Write) -> None:
    (fill(tmp_path / "runs", write, 1) / "0000" / "report.html").write_text("")
    page = make(tmp_path, write, 8)
    seen = browse(page)
    assert seen.console == []
    assert seen.count(r"<tr data-run=") == 8
    assert seen.count(r'class="curve"') == 8
    assert seen.count(r'class="line"') == 8
    assert re.findall(r'class="name"[^>]*>([^<]+)<', seen.dom) == ["model", "optimizer.lr", "seed", "val/accuracy"]
    assert re.findall(r'data-axis="2"[^>]*aria-label="([^;]*);', seen.dom) == ["seed: all values"]
    settings = seen.dom[seen.dom.index('<section id="settings"') :]
    assert re.findall(r'<th scope="row"[^>]*>([\w.]+)', settings) == ["model", "optimizer.lr", "seed"]
    assert 'href="runs/0000/report.html"' in seen.dom
    references = References()
    references.feed(page.read_text())
    assert all(url.startswith(("#", "runs/")) for url in references.found)
    assert "http" not in page.read_text().replace('http-equiv="', "")


def test_sorting_filtering_and_checking(browse: Browse, tmp_path: Path, write: Write) -> None:
    script = (
        LIST
        + """{
      rows(); header('val/accuracy').click(); rows(); header('val/accuracy').click(); rows();
      type('model=mlp seed>2'); settle(); rows(); curves();
      type('nothing-like-it'); settle(); rows(); document.querySelector('.clear').click(); settle(); rows();
      check('0001'); check('0004');
      settle();
      list(document.querySelectorAll('.curve.front').length + ' ' + document.querySelectorAll('.curve.back').length);
      list([...document.querySelectorAll('#settings thead th')].slice(1).map(th => th.textContent).join(' '));
      list(document.querySelector('header').getBoundingClientRect().top);
      list([...document.querySelectorAll('[data-parallel] .tick')].every(text => text.getBBox().x >= 0));
    }"""
    )
    found = said(browse(make(tmp_path, write, 6), script=script).dom)
    ids = [f"{number:04}" for number in range(6)]
    assert found == [
        " ".join(ids[::-1]),  # the newest first
        " ".join(ids),
        " ".join(ids[::-1]),
        "0004",
        "1",
        "",
        " ".join(ids[::-1]),
        "2 4",
        "0004 0001",
        "0",  # nothing above the page
        "true",
    ]


@pytest.mark.slow
def test_curves_are_smoothed_and_have_other_axes(browse: Browse, tmp_path: Path, write: Write) -> None:
    script = (
        LIST
        + """{
      const path = () => document.querySelector('[data-curves] .curve').getAttribute('d');
      const label = () => document.querySelector('[data-curves] svg').getAttribute('aria-label');
      const axis = () => document.querySelector('[data-curves]').textContent;
      const set = (selector, value) => {
        const control = document.querySelector(selector);
        control.value = value; control.checked = value; control.oninput();
        settle();
      };
      list(label()); const plain = path();
      set('.smoothing', 0.9); list(path() !== plain); set('.smoothing', 0);
      list(path() === plain);
      set('.across', 1); list(axis().includes('epoch'));
      set('.across', 2); list(axis().includes('minutes'));
      list(!document.querySelector('.timing').hidden);
      set('.across', 0); set('.logy', true); list(path() !== plain);
      set('.logy', false); list(path() === plain);
      set('.logx', true); list(path() !== plain && axis().includes('100') && !axis().includes('200'));
      set('.logx', false); set('.metric', 'train/loss'); list(label());
    }"""
    )
    found = said(browse(make(tmp_path, write, 3), script=script).dom)
    keys = "; arrow keys go along the curves"
    assert found == [f"val/accuracy of 3 runs{keys}", *["true"] * 8, f"train/loss of 3 runs{keys}"]


@pytest.mark.slow
def test_dragging_along_an_axis_selects_runs(browse: Browse, tmp_path: Path, write: Write) -> None:
    script = (
        LIST
        + """{
      const send = (target, kind, at) => {
        const box = document.querySelector('[data-axis="2"]').getBoundingClientRect();
        const y = box.top + 6 + at * (box.height - 12);
        target.dispatchEvent(new PointerEvent(kind, {clientX: box.left + 5, clientY: y, bubbles: true}));
      };
      send(document.querySelector('[data-axis="2"]'), 'pointerdown', -0.01);
      send(window, 'pointermove', 0.5); send(window, 'pointerup', 0.5); settle();
      rows(); list(document.querySelector('.selected').textContent);
    }"""
    )
    found = said(browse(make(tmp_path, write, 8), script=script).dom)
    assert found == ["0007 0006 0005 0004", "4 of 8 runs"]


@pytest.mark.slow
def test_the_keyboard_selects_ranges_and_goes_along_curves(browse: Browse, tmp_path: Path, write: Write) -> None:
    script = (
        LIST
        + """{
      const press = (key, shiftKey = false) => {
        const down = new KeyboardEvent('keydown', {key, shiftKey, bubbles: true, cancelable: true});
        document.activeElement.dispatchEvent(down);
        settle();
      };
      document.querySelector('[data-axis="2"]').focus();
      for (let i = 0; i < 5; i++) press('ArrowUp');
      press('ArrowDown', true); rows();
      list(document.activeElement.ariaLabel); press('Escape'); rows();
      document.querySelector('[data-curves] svg').focus();
      press('ArrowRight'); list('?');
    }"""
    ).replace("press('ArrowRight'); list('?');", KEYS_ON_CURVES)
    found = said(browse(make(tmp_path, write, 8), script=script).dom)
    ids = [f"{number:04}" for number in range(8)]
    assert found[0] == "0006 0005 0004 0003 0002"  # of 0 to 7, from 25% to 95% of the axis
    assert found[1].startswith("seed: 1.750 to 6.650; ")
    assert found[2] == " ".join(ids[::-1])
    assert [text.split()[:2] for text in found[3:]] == [["0000", "1"], ["0000", "11"], ["0001", "11"]]


@pytest.mark.slow
def test_confusion_matrices_are_side_by_side(browse: Browse, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 5)
    for number in range(3):
        folder = root / f"{number:04}" / "evaluation" / "test"
        folder.mkdir(parents=True)
        folder.joinpath("confusion.csv").write_text(f"target,cat,dog\ncat,{number},1\ndog,0,1\n")
    os.mkfifo(root / "0004" / "evaluation")  # of somebody else
    script = (
        LIST
        + """{
      const shown = () => list([...document.querySelectorAll('#confusion svg')].map(svg => svg.ariaLabel).join('|'));
      shown(); check('0000'); check('0002'); check('0004'); settle(); shown();
      check('0000'); check('0002'); settle(); list(document.querySelector('#confusion .grid').textContent);
    }"""
    )
    label = "Confusion matrix of {}, 2 classes, {} % right"
    both = [label.format("0002", "75.0"), label.format("0001", "66.7")]
    checked = [label.format("0002", "75.0"), label.format("0000", "50.0")]
    found = said(browse(write_page(tmp_path, find_runs(root)), script=script).dom)
    assert found == ["|".join(both), "|".join(checked), "None of these runs has a confusion matrix."]


def test_text_is_escaped(browse: Browse, tmp_path: Path, write: Write) -> None:
    facts = {"name": EVIL, "tags": [EVIL]}
    seen = browse(make(tmp_path, write, 2, **facts))
    assert "taken" not in re.findall(r"<title>(.*?)</title>", seen.dom)[0]
    assert seen.count("<img") == 0
    assert seen.console == []
    folder = write(tmp_path / "javascript:alert(1)")
    (folder / "report.html").write_text("")
    page = write_page(tmp_path, find_runs(tmp_path), EVIL)
    assert "javascript%3Aalert%281%29/report.html" in read_data(page)["links"]
    assert EVIL not in page.read_text()


def test_runs_without_metrics_or_without_differences(browse: Browse, tmp_path: Path, write: Write) -> None:
    for number in range(2):
        write(tmp_path / "runs" / str(number))
    for runs in ([], find_runs(tmp_path / "runs")):
        seen = browse(write_page(tmp_path, runs))
        assert seen.console == []
        assert "No run has logged metrics." in seen.dom
        assert "No setting differs between these runs" in seen.dom


@pytest.mark.slow
def test_one_value_is_a_dot_and_metrics_are_axes(browse: Browse, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 2, points=1)
    for number in range(2):
        extra = {f"k{index}": index + number for index in range(20)}
        write(root / f"r{number}", settings={"extra": extra}, metrics={"val/accuracy": 0.5 + number / 10})
    seen = browse(write_page(tmp_path, find_runs(tmp_path / "runs")))
    assert seen.count('class="curve dot"') == 2
    assert "val/accuracy" in re.findall(r"<text[^>]*>([^<]+)</text>", seen.dom.partition("data-parallel")[2])


def write_page(tmp_path: Path, runs: list[Any], title: str = "x") -> Path:
    return write_table(runs, tmp_path / "page.html", title)


@pytest.mark.slow
def test_points_are_limited(tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path, write, 40, points=20_000)
    runs = find_runs(root)
    data = collect(runs, [None] * len(runs))
    total = sum(len(run[0]) for curve in data["curves"] for run in curve["runs"])
    assert MAX_POINTS / 2 < total <= MAX_POINTS
    assert data["curves"][0]["name"] == "val/accuracy"


@pytest.mark.slow
def test_a_thousand_runs_are_drawn_within_seconds(browse: Browse, tmp_path: Path, write: Write) -> None:
    page = make(tmp_path, write, 1000)
    assert read_data(page)["ids"][0] == "0000"
    assert page.stat().st_size < 10_000_000
    script = """const began = performance.now(); document.querySelector('#runs input').value = 'model=mlp';
      document.querySelector('#runs input').oninput(); drawAll();
      document.documentElement.dataset.selected = Math.round(performance.now() - began);"""
    seen = browse(page, script=script)
    times = [int(re.findall(rf'data-{name}="(\d+)"', seen.dom)[0]) for name in ("drawn", "selected")]
    assert seen.count("<tr data-run=") == 1000
    assert max(times) < 8000  # 1 s and 0.1 s on two idle cores, printed by -s
    print(f"drawn after {times[0]} ms, selected after {times[1]} ms")


def test_the_command_writes_the_page(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "runs", write, 3)
    monkeypatch.chdir(tmp_path)
    commands.main(["runs", f"runs={tmp_path / 'runs'}", "seed>0", "--html"])
    commands.main(["runs", f"runs={tmp_path / 'runs'}", "--html=other.html"])
    assert read_data(tmp_path / "runs.html")["ids"] == ["0001", "0002"]
    assert len(read_data(tmp_path / "other.html")["ids"]) == 3


def test_a_folder_whose_name_is_no_text_is_linked(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "runs" / "a" / os.fsdecode(b"\xff\xfe"), id="x")
    (run / "report.html").touch()
    monkeypatch.chdir(tmp_path)
    commands.main(["runs", f"runs={tmp_path / 'runs'}", "--html"])
    assert read_data(tmp_path / "runs.html")["links"] == ["runs/a/%FF%FE/report.html"]
    watch = live.Watch(str(tmp_path / "runs"), query.parse(""))
    assert json.loads(watch.data()[1])["links"] == ["a/%FF%FE/report.html"]
