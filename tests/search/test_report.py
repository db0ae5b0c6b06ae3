"""Reports of searches, rendered by a real browser."""

from __future__ import annotations

import html
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from browser import Browse, References

from boltcutter.project import Project
from boltcutter.run.metrics import Mode
from boltcutter.search.plan import Plan
from boltcutter.search.report import write_report
from boltcutter.search.results import Result
from boltcutter.search.settings import Search

PROJECT = Project.find(Path(__file__))
METRICS: list[tuple[str, Mode]] = [("val/accuracy", "max")]
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
# Text of the rows that are shown, appended to the page after the charts were drawn again.
LIST_ROWS = """
  const list = () => {
    const rows = [...document.querySelectorAll('#trials tbody tr')].filter(row => !row.hidden);
    const shown = rows.map(row => row.cells[0].textContent).join(' ');
    document.body.append(Object.assign(document.createElement('p'), {className: 'shown', textContent: shown}));
  };"""


def make_results(folder: Path, count: int, *, validations: int = 5, second: bool = False) -> list[Result]:
    """Trials whose accuracy is best at a learning rate of 1e-3; of ten, two are pruned and the last one fails."""
    random_ = random.Random(0)
    results = []
    for number in range(count):
        values: dict[str, Any] = {
            "optimizer.lr": 10 ** random_.uniform(-5, -1),
            "optimizer": random_.choice(["adamw", "sgd"]),
            "model.hidden_size": random_.randint(16, 512),
            "task.compile": random_.random() < 0.5,
        }
        if values["optimizer"] == "sgd":
            values["optimizer.momentum"] = random_.random()
        accuracy = 0.99 - 0.1 * abs(math.log10(values["optimizer.lr"]) + 3) - 0.02 * random_.random()
        state = ("complete",) * 7 + ("pruned",) * 2 + ("failed",)
        objectives = {} if state[number % 10] == "failed" else {"val/accuracy": accuracy}
        if second and objectives:
            objectives["size"] = float(values["model.hidden_size"])
        curve = [(100 * step, accuracy * (1 - 0.5**step)) for step in range(1, validations + 1)]
        error = "RuntimeError: out of memory\nmore lines" if state[number % 10] == "failed" else ""
        run = folder / "trials" / f"{number:04d}"
        results.append(Result(number, state[number % 10], values, objectives, curve, {}, 60.0 + number, run, error))
    return results


def shown(dom: str) -> list[list[str]]:
    return [text.split() for text in re.findall(r'<p class="shown">(.*?)</p>', dom)]


def write(
    folder: Path,
    results: list[Result],
    *,
    metrics: list[tuple[str, Mode]] = METRICS,
    command: str = "",
    **more: Any,
) -> Path:
    search = Search(space={"optimizer.lr": "loguniform(1e-5, 1e-1)"})
    plan = Plan(PROJECT, folder, {}, [], search, metrics, [{}], 1, 0.0, command=command)
    return write_report(plan, results, **more)


def read_data(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


def test_all_parts_are_drawn(browse: Browse, tmp_path: Path) -> None:
    results = make_results(tmp_path, 60)
    best = max((r for r in results if r.state == "complete"), key=lambda r: r.objectives["val/accuracy"])
    best.folder.mkdir(parents=True)
    (best.folder / "report.html").write_text("")
    command = "scripts/search.py search=asha logger.api_key=hush"
    importances = [("val/accuracy", {"optimizer.lr": 0.75, "optimizer": 0.25})]
    page = write(tmp_path, results, command=command, statistics="run  val/loss\n0.9 ± 0.1", importances=importances)
    seen = browse(page)
    assert seen.console == []
    sections = re.findall(r'<section id="(\w+)"', seen.dom)
    assert '<pre>run  val/loss\n<span class="sentence">0.9 ± 0.1</span></pre>' in seen.dom
    assert sections == ["statistics", "history", "parallel", "importance", "slices", "curves", "trials", "command"]
    assert seen.count(r'<svg viewBox="0 0 \d{3}') == 1 + 1 + 5 + 1  # history, parallel, slices, curves
    assert seen.count(r'class="many lines') > 12
    assert seen.count("<tr data-trial=") == 60
    assert f'<a href="trials/{best.number:04d}/report.html">{best.number:04d}</a>' in seen.dom
    for text in ("42 complete", "12 pruned", "6 failed", "RuntimeError: out of memory", "0.9 ± 0.1"):
        assert text in seen.dom
    assert "more lines" not in seen.dom
    assert "hush" not in seen.dom
    shares = re.findall(r"<span>([\w.]+)</span><i style=.--share: ([\d.]+)%", seen.dom)
    assert shares == [("optimizer.lr", "75.0"), ("optimizer", "25.0")]


def test_clicking_a_header_sorts_trials(browse: Browse, tmp_path: Path) -> None:
    results = make_results(tmp_path, 12)
    script = (
        LIST_ROWS
        + """
      const header = title => [...document.querySelectorAll('#trials th')].find(th => th.textContent === title);
      list(); header('optimizer.lr').click(); list(); header('optimizer.lr').click(); list();
      header('val/accuracy').click(); list();"""
    )
    initial, up, down, accuracy = shown(browse(write(tmp_path, results), script=script).dom)
    by_lr = [f"{r.number:04d}" for r in sorted(results, key=lambda r: r.values["optimizer.lr"])]
    assert (up, down) == (by_lr, by_lr[::-1])
    scores = {f"{r.number:04d}": r.objectives.get("val/accuracy", math.inf) for r in results}
    assert accuracy == sorted(accuracy, key=scores.__getitem__)  # without a value: last
    complete = [f"{r.number:04d}" for r in results if r.state == "complete"]
    assert initial[: len(complete)] == sorted(complete, key=lambda number: -scores[number])


@pytest.mark.slow
def test_brushing_and_filtering_select_trials(browse: Browse, tmp_path: Path) -> None:
    results = make_results(tmp_path, 40)
    script = (
        LIST_ROWS
        + """
      const drag = (k, from, to) => {  // fractions of an axis from its top
        const box = document.querySelector(`[data-axis="${k}"]`).getBoundingClientRect();
        const send = (target, kind, at) => target.dispatchEvent(new PointerEvent(kind, {
          clientX: box.left + box.width / 2, clientY: box.top + 6 + at * (box.height - 12), bubbles: true}));
        send(document.querySelector(`[data-axis="${k}"]`), 'pointerdown', from);
        send(window, 'pointermove', to);
        send(window, 'pointerup', to);
      };
      const type = text => { search.value = text; search.oninput(); };
      drag(0, 0, .5); list();
      draw();  // at once, instead of with the next frame, which a page without a window may never have
      document.body.dataset.faint = document.querySelectorAll('#curves .out').length;
      drag(1, 0, .45); list();
      document.querySelector('.clear').click(); list();
      type('lr<0.001 sgd'); list(); type('state=failed'); list();"""
    )
    seen = browse(write(tmp_path, results), script=script)
    rates = [r.values["optimizer.lr"] for r in results]
    middle = math.sqrt(min(rates) * max(rates))
    high = {f"{r.number:04d}" for r in results if r.values["optimizer.lr"] >= middle}
    sgd = {f"{r.number:04d}" for r in results if r.values["optimizer"] == "sgd"}
    low = {f"{r.number:04d}" for r in results if r.values["optimizer.lr"] < 0.001}
    assert [set(rows) for rows in shown(seen.dom)] == [
        high,
        high & sgd,
        {f"{r.number:04d}" for r in results},
        low & sgd,
        {f"{r.number:04d}" for r in results if r.state == "failed"},
    ]
    assert 'data-faint="1"' in seen.dom  # all other curves share a path
    assert seen.console == []


@pytest.mark.slow
def test_hovering_shows_the_values_of_a_trial(browse: Browse, tmp_path: Path) -> None:
    [result] = [
        Result(7, "complete", {"optimizer.lr": 0.001230000001}, {"val/accuracy": 0.5}, [(1, 0.5)], {}, 1.0, tmp_path)
    ]
    script = """
      const svg = document.querySelector('[data-history] svg'), box = svg.getBoundingClientRect();
      const [x, y] = document.querySelector('[data-history] .dots').getAttribute('d').match(/[\\d.]+/g);
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + +x, clientY: box.top + +y}));
      document.body.dataset.shown = tip.innerText.replace(/\\s+/g, ' ');"""
    seen = browse(write(tmp_path, [result], importances=[("val/accuracy", {})]), script=script)
    assert 'data-shown="trial 0007 complete val/accuracy 0.5000 optimizer.lr 0.00123"' in seen.dom
    assert re.search(r"<td[^>]*>0.00123</td>", seen.dom)
    assert "Needs ten complete trials that differ." in seen.dom


def test_two_metrics_show_the_pareto_front(browse: Browse, tmp_path: Path) -> None:
    results = make_results(tmp_path, 40, second=True)
    metrics: list[tuple[str, Mode]] = [*METRICS, ("size", "min")]
    complete = [(r.objectives["val/accuracy"], -r.objectives["size"]) for r in results if r.state == "complete"]
    front = [a for a in complete if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in complete)]
    script = LIST_ROWS + "search.value = 'Pareto=yes'; search.oninput(); list();"
    seen = browse(write(tmp_path, results, metrics=metrics), script=script)
    assert seen.console == []
    assert len(shown(seen.dom)[0]) == len(front)
    assert seen.count('class="best"') == len(front) > 1
    assert seen.count('data-history="') == 2


def test_a_search_without_results_renders_a_page(browse: Browse, tmp_path: Path) -> None:
    running = Result(0, "running", {"optimizer.lr": 0.1}, {}, [], {}, 0.0, tmp_path / "trials" / "0000")
    failed = Result(
        1, "failed", {"optimizer.lr": math.nan}, {"val/accuracy": math.nan}, [(1, math.nan)], {}, 0.0, tmp_path
    )
    seen = browse(write(tmp_path, [running, failed]))
    assert seen.console == []
    assert seen.count("<tr data-trial=") == 2
    assert "0 trials" in write(tmp_path, []).read_text()


def test_text_is_escaped_and_nothing_is_loaded(browse: Browse, tmp_path: Path) -> None:
    values = {f"optimizer.{EVIL}": 0.1, "optimizer": EVIL}
    evil = [
        Result(n, "failed", values, {EVIL: float(n)}, [(1, 0.5)], {}, 1.0, tmp_path / EVIL.replace("/", "_"), EVIL)
        for n in range(2)
    ]
    folder = tmp_path / EVIL.replace("/", "_")
    folder.mkdir()
    path = write(folder, evil, metrics=[(EVIL, "max")], statistics=EVIL, command=f"train.py {EVIL}")
    seen = browse(path)
    assert seen.console == []
    assert "<title>taken" not in seen.dom
    assert seen.count(r"<script\b") == 2
    page = write(tmp_path, make_results(tmp_path, 20)).read_text()
    references = References()
    references.feed(page)
    assert all(found.startswith("#") for found in references.found)
    assert "://" not in page
    assert "default-src 'none'" in page


@pytest.mark.slow
def test_the_report_of_a_thousand_trials_opens_quickly(browse: Browse, tmp_path: Path) -> None:
    page = write(tmp_path, make_results(tmp_path, 1000, validations=20))
    assert page.stat().st_size < 700_000
    started = time.monotonic()
    seen = browse(page)
    assert time.monotonic() - started < 5 * 3  # with the start of the browser, on a machine that may be busy
    assert seen.console == []
    drawn = re.search(r'data-drawn="(\d+)"', seen.dom)
    assert drawn
    assert int(drawn[1]) < 5000  # milliseconds
    assert seen.count("<tr data-trial=") == 1000


@pytest.mark.slow
def test_the_report_fits_a_phone(browse: Browse, tmp_path: Path) -> None:
    page = write(tmp_path, make_results(tmp_path, 30))
    frame = tmp_path / "phone.html"
    content = html.escape(page.read_text())
    frame.write_text(f'<body><iframe style="width: 360px; border: 0" srcdoc="{content}"></iframe></body>')
    measure = """onload = () => {
      const inner = document.querySelector('iframe').contentDocument.documentElement;
      document.body.dataset.width = inner.scrollWidth + ' of ' + inner.clientWidth;
    }"""
    assert 'data-width="360 of 360"' in browse(frame, script=measure).dom


def test_non_finite_numbers_do_not_damage_the_data(tmp_path: Path) -> None:
    curve = [(1, math.inf), (2, 0.5)]
    result = Result(0, "complete", {"a": 1.0}, {"val/accuracy": math.nan}, curve, {}, 1.0, tmp_path)
    data = read_data(write(tmp_path, [result]))
    assert (data["objectives"], data["curves"]) == ([[None]], [[[2], [0.5]]])


def test_whole_numbers_among_options_are_in_their_order(tmp_path: Path) -> None:
    options = ["128", "auto", "16", "1e-3"]
    results = [Result(n, "complete", {"size": option}, {}, [], {}, 1.0, tmp_path) for n, option in enumerate(options)]
    data = read_data(write(tmp_path, results))
    assert data["keys"][0]["options"] == ["16", "128", "1e-3", "auto"]
    assert data["values"] == [[1, 3, 0, 2]]
