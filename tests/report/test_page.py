"""Reports, rendered by a real browser."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Browse, References
from PIL import Image
from report_files import (
    CONFIG,
    EVIL,
    FILES,
    RECORD,
    page_data,
    write_classification,
    write_regression,
    write_run,
)

from boltcutter.report import outcome_report
from boltcutter.report import page as report
from boltcutter.run import evaluations


def test_all_parts_of_a_classification_are_drawn(browse: Browse, tmp_path: Path) -> None:
    seen = browse(report.write_page(write_classification(tmp_path / "run")))
    assert seen.console == []
    sections = re.findall(r'<section id="(\w+)"', seen.dom)
    assert sections == ["curves", "metrics", "confusion", "classes", "worst", "config", "lineage", "attempts"]
    assert seen.count('<path class="curve') == 6  # loss 3, accuracy, learning rate, throughput
    assert seen.count('class="best"') == 2
    assert seen.count('class="cell-') == 4
    assert seen.count('<img src="data:image/png') == 3
    for text in ("0.8750", "2 h 05 min", "8 × NVIDIA H200, CUDA 12.8", "fingerprint-of-data", "71.4 %", "0123456789"):
        assert text in seen.dom


def test_all_parts_of_a_regression_are_drawn(browse: Browse, tmp_path: Path) -> None:
    seen = browse(report.write_page(write_regression(tmp_path / "run")))
    assert seen.console == []
    sections = re.findall(r'<section id="(\w+)"', seen.dom)
    assert sections == ["curves", "metrics", "predictions", "worst", "config", "lineage", "attempts"]
    assert seen.count('<circle class="dot"') == 100  # 50 samples, and their residuals
    assert "input (10)" in seen.dom
    assert "Missing from this report" not in seen.dom


def test_findings_are_listed_and_notes_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = [
        {"check": "double-softmax", "level": "certain", "text": "probabilities <b>", "step": 0},
        {"check": "no-gradient", "level": "note", "text": "head got no gradient", "step": 60},
    ]
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"findings": found}))
    page = report.render_page(folder)
    assert page.index("double-softmax") < page.index("Notes") < page.index("head got no gradient")
    assert "probabilities &lt;b&gt;" in page


def test_a_finding_shows_its_evidence_and_one_of_another_kind_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    numbers = [{"of": "net.0.weight", "shape": [64, 784], "rms": 3.5, "gradient": "none"}]
    picture = {"shape": [1, 2, 2], "pixels": base64.b64encode(bytes([0, 80, 160, 255])).decode()}
    finding = {"check": "range", "level": "certain", "text": "targets", "step": 0}
    good = finding | {"evidence": {"numbers": numbers, "sample": {"picture": picture, "fields": {"1": "<7>"}}}}
    strange = [
        finding | {"evidence": evidence}
        for evidence in (3, {"numbers": 3}, {"numbers": [3]}, {"sample": [1]}, {"sample": {"picture": {"shape": 1}}})
    ]
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"findings": [good, *strange]}))
    page = report.render_page(folder)
    assert "<code>net.0.weight</code>: shape 64 × 784, rms 3.5, gradient none" in page
    assert page.count('alt="A sample that shows it"') == 1
    assert "sample, 1: &lt;7&gt;" in page


def test_repeated_evaluations_of_the_test_split_are_counted(tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    evaluations.append(folder, {"split": "test", "checkpoint": "best.ckpt"})
    assert "test split was evaluated" not in report.write_page(folder).read_text()
    evaluations.append(folder, {"split": "test", "checkpoint": "<b>last"})
    assert (
        "test split was evaluated 2 times, at 2 checkpoints (best.ckpt, &lt;b&gt;last)."
        in report.write_page(folder).read_text()
    )


@pytest.mark.slow
def test_hovering_shows_values(browse: Browse, tmp_path: Path) -> None:
    hover = """
      for (const [selector, across, down] of [['[data-chart] svg', .5, .5], ['#matrix .cell-wrong', .5, .5]]) {
        const node = document.querySelector(selector), box = node.getBoundingClientRect();
        const place = {clientX: box.left + box.width * across, clientY: box.top + box.height * down, bubbles: true};
        node.dispatchEvent(new PointerEvent('pointermove', place));
        const shown = {className: 'shown', textContent: tip.innerText};
        document.body.append(Object.assign(document.createElement('p'), shown));
      }"""
    seen = browse(report.write_page(write_classification(tmp_path / "run")), script=hover)
    curves, matrix = re.findall(r'<p class="shown">(.*?)</p>', seen.dom, re.S)
    assert re.search(r"step \d+\s+epoch 1\s+train.*val", curves, re.S)
    assert re.search(r"target\s+cat\s+prediction\s+dog\s+samples\s+2 of 7", matrix)
    assert seen.console == []


def test_names_are_escaped(browse: Browse, tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run", names=(EVIL, "dog", "owl"))
    evil_record = RECORD | {"name": EVIL, "command": "train.py 'x=" + EVIL.replace("'", "") + "'", "data": EVIL}
    evil_record["attempts"] = [RECORD["attempts"][0] | {"reason": EVIL}]
    (folder / "record.json").write_text(json.dumps(evil_record))
    (folder / "config.yaml").write_text(CONFIG + f"evil: {json.dumps(EVIL)}\n")
    metrics = (folder / "metrics.csv").read_text()
    quoted = EVIL.replace('"', '""')
    (folder / "metrics.csv").write_text(metrics.replace("lr-AdamW", f'"{quoted}"', 1))
    seen = browse(report.write_page(folder))
    assert seen.console == []
    assert "<title>taken" not in seen.dom
    assert seen.count(r"<script\b") == 2
    assert seen.count("<img (?!src=.data:)") == 0


@pytest.mark.parametrize(
    ("command", "changed", "expected"),
    [
        ("scripts/train.py 'name=a b' seed=1", {}, "python scripts/train.py 'name=a b' seed=1"),
        ("/lib/boltcutter/__main__.py train seed=1", {}, "python -m boltcutter train seed=1"),
        ("train.py seed=1 folder=/runs/trials/0000", {}, "python train.py seed=1"),  # which holds a run
        ("train.py seed=1", {"trainer.max_epochs": {"was": 1, "now": 2}}, "boltcutter train 'reproduce={}'"),
        ("", {}, ""),
    ],
)
def test_the_command_trains_the_same_again(
    command: str, changed: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "a run")
    record = RECORD | {"command": command, "attempts": [RECORD["attempts"][0], {"changed": changed}]}
    (folder / "record.json").write_text(json.dumps(record))
    page = report.render_page(folder)
    found = re.findall(r'<code class="command">(.*?)</code>', page)
    assert list(map(html.unescape, found)) == [expected.format(folder)] * bool(expected)


@pytest.mark.parametrize("make", [write_classification, write_regression])
def test_the_page_has_no_external_references(make: Callable[[Path], Path], tmp_path: Path) -> None:
    page = report.write_page(make(tmp_path / "run")).read_text()
    references = References()
    references.feed(page)
    assert references.found
    assert all(found.startswith(("#", "data:image/")) for found in references.found)
    assert "://" not in page
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", page)
    assert "default-src 'none'" in page  # the browser would refuse anyway


@pytest.mark.parametrize("make", [pytest.param(write_classification, marks=pytest.mark.slow), write_regression])
def test_the_page_fits_a_phone(make: Callable[[Path], Path], browse: Browse, tmp_path: Path) -> None:
    page = report.write_page(make(tmp_path / "run"))
    frame = tmp_path / "phone.html"
    frame.write_text(
        f'<body><iframe style="width: 360px; border: 0" srcdoc="{html.escape(page.read_text())}"></iframe></body>'
    )
    measure = """onload = () => {
      const inner = document.querySelector('iframe').contentDocument.documentElement;
      document.body.dataset.width = inner.scrollWidth + ' of ' + inner.clientWidth;
    }"""
    assert 'data-width="360 of 360"' in browse(frame, script=measure).dom


@pytest.mark.parametrize(("scheme", "dark"), [("0", True), pytest.param("1", False, marks=pytest.mark.slow)])
def test_the_page_follows_the_color_scheme(scheme: str, dark: bool, browse: Browse, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    flags = [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}", "--window-size=800,600"]
    browse(report.write_page(write_classification(tmp_path / "run")), *flags, dump=False)
    with Image.open(shot) as image:
        assert (np.median(np.asarray(image.convert("L"))) < 100) == dark


@pytest.mark.timeout(60)
def test_files_of_somebody_else_that_expand_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_classification(tmp_path / "run")
    lines = [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "config.yaml").write_text("\n".join(["b0: &b0 [x]", *lines, "choices: {model: *b11}"]))
    monkeypatch.setattr(outcome_report, "MAX_WORST", 1 << 20)
    np.savez_compressed(folder / "evaluation" / "test" / "worst.npz", inputs=np.zeros((1 << 20) + 1, np.uint8))
    page = report.write_page(folder).read_text()
    assert "aliases, which may multiply" in page
    assert "larger than 1 MiB" in page
    np.savez(folder / "evaluation" / "test" / "worst.npz", inputs=np.zeros(1, np.uint8))
    (folder / "config.yaml").write_text("a: 1\n" * (1 << 18))
    (folder / "metrics.csv").write_text(",".join(map(str, range(1 << 17))) + "\n")
    page = report.write_page(folder).read_text()
    assert "Configuration: cannot be read: ValueError: larger than 1 MiB" in page
    assert "Curves: cannot be read: ValueError: more names than can be read" in page


TOO_DEEP = "Configuration: cannot be read: .*(nested too deeply|\nexceeded maximum nesting depth)"  # PyYAML 6.0.4


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("[" * 1_000_000, TOO_DEEP),
        ('{"a":' * 200_000, TOO_DEEP),
        ("- " * 500_000, TOO_DEEP),
        ("a: " + "1:" * 500_000 + "1", "<h1>digits"),  # a number to the base of 60
        ("callback: null\nchoices: {model: mlp, logger: null}", "<li>model <b>mlp</b></li>"),
    ],
    ids=["lists", "mappings", "items", "digits", "null"],
)
def test_a_configuration_of_somebody_else_takes_little_time(content: str, shown: str, tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    (folder / "config.yaml").write_text(content)
    page = report.write_page(folder).read_text()
    assert re.search(shown, page)
    assert "<li>logger" not in page


def test_fifos_and_endless_files_of_somebody_else_are_not_read(tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    test = folder / "evaluation" / "test"
    for file in (folder / "metrics.csv", test / "predictions.csv", test / "worst.npz", test / "series.svg"):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    signal.alarm(60)
    text = report.write_page(folder).read_text()
    assert text.count("not an ordinary file") == 2
    (test / "metrics.json").unlink()
    assert report.write_page(folder).read_text().count("not an ordinary file") == 3
    signal.alarm(0)
    (test / "series.svg").unlink()
    for file in (folder / "metrics.csv", test / "series.svg"):
        file.unlink(missing_ok=True)
        file.touch()
        os.truncate(file, 1 << 40)
        file.chmod(0o666)
    text = report.write_page(folder).read_text()
    assert "larger than 2048 MiB" in text
    assert "larger than 64 MiB" in text


def test_a_record_of_somebody_else_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_classification(tmp_path / "run")
    (folder / "config.yaml").write_text("callback: [1]\nname: a\n")
    report.write_or_warn(folder)
    (folder / "record.json").write_text(json.dumps(RECORD | {"metrics": [5]}))
    report.write_or_warn(folder)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(f"warning: {folder}/report.html could not be written (") for line in lines)


@pytest.mark.parametrize("lost", FILES)
@pytest.mark.parametrize("damage", [None, b"", b"\xff{[,\n1,2,3,4,5\n"], ids=["missing", "empty", "damaged"])
def test_an_unreadable_part_is_listed_as_missing(lost: str, damage: bytes | None, tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    if damage is None:
        (folder / lost).unlink()
        expected = f"{lost} is missing"
    else:
        (folder / lost).write_bytes(damage)
        expected = "cannot be read: "
    page = report.write_page(folder).read_text()
    assert expected in page
    assert "Missing from this report" in page


def test_an_empty_folder_renders_a_page(browse: Browse, tmp_path: Path) -> None:
    seen = browse(report.write_page(tmp_path))
    assert seen.console == []
    assert "record.json is missing" in seen.dom
    assert "<section" not in seen.dom


def test_a_run_without_a_test_shows_the_best_validation_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    shutil.rmtree(folder / "evaluation")
    (folder / "record.json").write_text(json.dumps(RECORD | {"test": {}}))
    page = report.write_page(folder).read_text()
    assert "best val accuracy" in page
    assert "at step 301" in page


@pytest.mark.parametrize("tested", [True, False])
def test_validation_metrics_are_those_of_the_checkpoint(tested: bool, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    test = RECORD["test"] if tested else {}
    (folder / "record.json").write_text(json.dumps(RECORD | {"test": test, "best_after": 201}))
    (folder / "evaluation" / "test" / "metrics.json").write_text(json.dumps(test))
    values = pd.read_csv(folder / "metrics.csv").set_index("step").loc[200]  # the checkpoint was saved after 201 steps
    page = re.sub(r"(<[^>]+>|\s)+", " ", report.write_page(folder).read_text().split("<main>")[0])
    for name in ("accuracy", "loss"):
        shown = f"{values[f'val/{name}']:.4g}"
        end = f"val {shown} at this checkpoint" if tested else f"val {name} {shown} best checkpoint, step 201"
        assert end in page


def test_secrets_are_redacted(tmp_path: Path) -> None:
    page = report.write_page(write_classification(tmp_path / "run")).read_text()
    assert "hush" not in page
    assert "logger.api_key=***" in page


def test_the_report_of_a_long_run_is_small(tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    steps = np.arange(100_000)
    noise = np.random.default_rng(0).random((3, len(steps)))
    columns = {"step": steps, "epoch": steps // 500, "train/loss": noise[0], "lr-AdamW": noise[1], "val/loss": noise[2]}
    pd.DataFrame(columns).to_csv(folder / "metrics.csv", index=False)
    assert report.write_page(folder).stat().st_size < 500_000


def test_downsampling_keeps_ends_and_extremes() -> None:
    values = np.random.default_rng(0).normal(size=12_345)
    values[6_001], values[7_002] = 99, -99
    kept = report.downsample(values, 100)
    assert len(kept) <= 100
    assert {0, 6_001, 7_002, 12_344} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert report.downsample(values[:100], 100).tolist() == list(range(100))


def test_non_finite_values_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with open(folder / "metrics.csv", "a") as file:
        file.write("310,3,,nan,,,,\n320,3,,inf,nan,,,\n")
    page = report.write_page(folder).read_text()
    assert "train, step: 2 non-finite values" in page
    assert "val: 1 non-finite value" in page
    assert "NaN" not in page


@pytest.mark.parametrize(("mode", "step"), [("min", 301), ("max", 101)])
def test_the_best_value_follows_the_mode_of_the_callback(mode: str, step: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text(CONFIG.replace("mode: min", f"mode: {mode}"))
    data = page_data(report.write_page(folder))
    loss = next(chart for chart in data["charts"] if chart["title"] == "loss")
    assert loss["best"][0] == step
