"""The examples of the gallery: each is short, its page shows it, and it learns; the commands are those of its page."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, require
from new_project import in_shell

from boltcutter.assembly.assemble import read_config
from boltcutter.project import Project

GALLERY = ROOT / "docs" / "gallery"
LEARNED = {  # metric, sign of what is better, and what no model has that was trained for one step
    "gan": ("val/distance", -1, 2.5),
    "vae": ("test/loss", -1, 26.0),
    "diffusion": ("test/loss", -1, 0.45),
    "bert": ("val/loss", -1, 7.0),
    "lora": ("test/accuracy", 1, 0.4),
    "segmentation": ("test/iou", 1, 0.15),
    "forecast": ("test/skill", 1, 0.5),
    "ragged": ("test/accuracy", 1, 0.9),
    "graph": ("test/accuracy", 1, 0.85),
    "cartpole": ("val/return", 1, 80.0),
    "folds": ("val/accuracy", 1, 0.9),
    "resnet18": ("test/accuracy", 1, 0.7),
    "detection": ("test/found", 1, 0.3),
    "fcn": ("test/iou", 1, 0.25),
}
TORCHVISION = ("resnet18", "detection", "fcn")  # which constraints.txt does not have


def commands(name: str) -> list[str]:
    return re.findall(r"^cd docs/gallery && .*", (GALLERY / f"{name}.md").read_text(), re.M)


def require_packages(name: str) -> None:
    if name in ("bert", "lora"):
        require(install="pip install -c constraints.txt -e '.[gallery]'", package="transformers")
    if name in TORCHVISION:
        pytest.importorskip("torchvision")


def test_each_example_has_a_test() -> None:
    assert {file.stem for file in GALLERY.glob("*.py")} == LEARNED.keys()
    assert {file.stem for file in GALLERY.glob("*.md")} == LEARNED.keys() | {"README"}


@pytest.mark.parametrize("name", LEARNED)
def test_an_example_is_short_and_shown(name: str) -> None:
    option = GALLERY / "configs" / "experiment" / f"{name}.yaml"
    lines = [line for file in (GALLERY / f"{name}.py", option) for line in file.read_text().splitlines()]
    assert len([line for line in lines if line.strip()]) <= 80
    page = (GALLERY / f"{name}.md").read_text()
    assert len(page.splitlines()) <= 20
    assert f"]({name}.png)" in page
    assert f"]({name}.md)" in (GALLERY / "README.md").read_text()
    assert 2_000 < (GALLERY / f"{name}.png").stat().st_size < 60_000
    assert any(f"experiment={name}" in command for command in commands(name))


@pytest.mark.parametrize("name", LEARNED)
def test_an_example_is_a_valid_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages(name)
    monkeypatch.syspath_prepend(GALLERY)
    config = read_config(Project.find(GALLERY), [f"experiment={name}"])
    assert config.name == name


def result(name: str, gallery: Path) -> float:
    """The metric of the newest run of an example; of a search, the mean of the folds."""
    metric = LEARNED[name][0]
    if name == "folds":
        (table,) = (gallery / "runs").rglob("trials.csv")
        return float(pd.read_csv(table)[metric].mean())
    (folder,) = (gallery / "runs" / name).iterdir()
    record = json.loads((folder / "record.json").read_text())
    return float((record.get("test") or record["metrics"])[metric])


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", LEARNED)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    require_packages(name)
    gallery = tmp_path / "docs" / "gallery"
    shutil.copytree(GALLERY, gallery, ignore=shutil.ignore_patterns("runs", "*.png", "__pycache__"))
    _, sign, threshold = LEARNED[name]
    (command,) = commands(name)
    in_shell(command, tmp_path)
    assert sign * result(name, gallery) > sign * threshold
    shutil.rmtree(gallery / "runs" / name)
    in_shell(f"{command} trainer.max_epochs=1 trainer.limit_train_batches=1", tmp_path)
    assert sign * result(name, gallery) < sign * threshold
