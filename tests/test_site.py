"""The site of the documentation: it builds without warnings, loads nothing from elsewhere, and fits on a phone."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Tab
from conftest import ROOT, require

from boltcutter.project import tomllib

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = Path(sys.executable).with_name("mkdocs")
    mkdocs = str(beside) if beside.is_file() else shutil.which("mkdocs")
    if mkdocs is None:
        require("mkdocs", install="pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(mkdocs), "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_of_the_repository_and_the_code_are_there(site: Path) -> None:
    groups = {folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir()}
    assert {file.stem for file in (site / "configs").glob("*.html")} == groups
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} <= {file.stem for file in site.glob("*.html")}
    assert "Number of units of each hidden layer" in (site / "configs" / "model.html").read_text()
    assert 'id="boltcutter.api.functions.train"' in (site / "reference" / "api.html").read_text()
    drawn = (site / "architecture.html").read_text().partition('<svg class="architecture"')[2].partition("</svg>")[0]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    packages = {name for line in contracts[0]["layers"] for name in re.findall(r"\w+", line)}
    assert {*re.findall(r">(\w+)</text>", drawn)} == packages
    assert not list(site.rglob("*.py"))
    assert not re.search(r'<span class="w"> {3,}</span><span class="c1">#', (site / "training.html").read_text())


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loading = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*?\ssrc=\"?([^\s\">]+)|<link\b[^>]*?\shref=\"?([^\s\">]+)"
    )
    for page in site.rglob("*.html"):
        found = ["".join(groups) for groups in loading.findall(page.read_text())]
        assert found
        assert not [url for url in found if re.match(r"(?:\w+:)?//", url)], page.name
    for file in site.glob("assets/stylesheets/*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", file.read_text()), file.name


def test_pages_fit_on_a_phone(site: Path, open_tab: Callable[[str], Tab]) -> None:
    tab = open_tab("about:blank")
    tab.send("Emulation.setDeviceMetricsOverride", **PHONE)
    tab.send("Page.enable")
    wide = {}
    for page in sorted(site.rglob("*.html")):
        tab.send("Page.navigate", url=page.as_uri())
        tab.wait(f"location.href.endsWith({str(page.name)!r}) && document.readyState == 'complete'", seconds=60)
        if (width := tab.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
            wide[page.name] = width
    assert not wide


def test_search_works_in_a_page_opened_from_a_file(site: Path, open_tab: Callable[[str], Tab]) -> None:
    tab = open_tab((site / "glossary.html").as_uri())
    tab.wait("document.readyState == 'complete' && !!document.querySelector('.md-search__input')", seconds=60)
    tab.evaluate("document.querySelector('#__search').click(); document.querySelector('.md-search__input').focus()")
    tab.send("Input.insertText", text="preemptio")
    tab.send("Input.dispatchKeyEvent", type="keyDown", key="n", text="n")
    tab.send("Input.dispatchKeyEvent", type="keyUp", key="n")
    tab.wait("document.querySelectorAll('.md-search-result__item').length > 0", seconds=60)


QUESTIONS = {
    "how do I put my own training_step loss into it": "a-custom-loss-function-or-a-training_step-of-my-own",
    "my nn.Module has no LightningModule, how to use it?": "my-own-nnmodule-plain-pytorch-without-a-lightningmodule",
    "where are checkpoints saved": "where-checkpoints-are-saved",
    "how to do 5 seeds and report mean and std": "another-seed-or-several-mean-and-standard-deviation",
    "feature importance of columns": "which-columns-matter-feature-importance",
    "my classes are imbalanced": "class-weights-for-imbalanced-data-and-rare-classes",
    "cuda out of memory": "out-of-memory",
    "does it work on windows": "windows-and-wsl",
    "WANDB_API_KEY": "wb-login-and-wandb_api_key",
    "different learning rate for backbone and head": "smaller-learning-rates-for-early-layers",  # by other names
    "freeze the encoder, then unfreeze it later": "freeze-a-part-of-the-model",
    "data loader too slow": "workers-of-the-data-loader-loading-is-slow-cpus-for-each-gpu",
    "pick up where my run stopped": "stop-a-run-and-continue-it-later",
    "How do I resume training from a saved checkpoint?": "resume-ckpt_path-or-train-for-longer",
    "Where are the logs?": "log-files-of-a-run-or-job",
    "Which model should I use?": "choose-another-model-and-which-to-begin-with",
    "Is the data shuffled during training?": "order-of-samples-shuffle",
    "Why is nothing showing up in my graphs?": "a-metric-is-missing-in-wb-or-tensorboard",
    "Why is everything classified as one class?": "the-loss-does-not-fall-or-accuracy-stays-at-chance",
    "model.fit in keras": "keras",
    "gradiant cliping": "gradient-clipping",  # misspelt
    "use only gpu 2 and 3": "choose-the-gpu-such-as-the-second-one-only",  # by digits, which tell little
    "save only the best 3 checkpoints by val f1": "keep-the-best-three-checkpoints",
    "which run is the best by validation loss": "the-best-run",
    "quick smoke test before the real training": "try-everything-before-a-long-training-smoke-test-dry-run",
    "tokenization takes forever, do it once": "preprocess-or-tokenize-the-data-once-not-in-each-run",
}


def test_questions_are_answered_by_the_search(site: Path, open_tab: Callable[[str], Tab]) -> None:
    tab = open_tab((site / "glossary.html").as_uri())
    tab.wait("document.readyState == 'complete' && !!document.querySelector('.md-search__input')", seconds=60)
    missing = {}
    for question, answer in QUESTIONS.items():
        tab.evaluate(
            f"i = document.querySelector('.md-search__input'); i.focus(); i.value = {question!r};"
            "i.dispatchEvent(new KeyboardEvent('keyup'))"
        )
        first = (
            "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3).map(found => found.innerHTML).join()"
        )
        try:
            tab.wait(f"{first}.includes('#{answer}')")
        except AssertionError:
            missing[question] = tab.evaluate("document.querySelector('.md-search-result').innerText")
    assert not missing


def test_the_site_is_light_and_dark(site: Path, open_tab: Callable[[str], Tab]) -> None:
    tab = open_tab((site / "index.html").as_uri())
    backgrounds = set()
    for scheme in ("light", "dark"):
        tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.send("Page.reload")
        expected = "slate" if scheme == "dark" else "default"
        tab.wait(f"document.body && document.body.getAttribute('data-md-color-scheme') == '{expected}'", seconds=60)
        backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
