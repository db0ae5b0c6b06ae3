"""Runs that were exported, shared by the tests of this folder. Do not modify."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, ROOT, Script

GPT = ["data=text", "model=gpt", "task=language", f"data.path={ROOT}/README.md", "data.shape=[32]"]
SMALL = ["model.num_layers=1", "model.hidden_size=64", "trainer.max_steps=30", "optimizer.lr=0.01"]


def export(script: Script, run: Path, formats: str, *overrides: str) -> dict[str, Any]:
    done = script("export", f"run={run}", f"export={formats}", "export.max_drop=100", *overrides, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((run / "export" / "export.json").read_text())["results"]
    return found


@pytest.fixture(scope="session")
def digits(script: Script, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("exported") / "digits"
    shutil.copytree(trained, run)
    export(script, run, "[torch,onnx,int8-static,safetensors]")
    return run


@pytest.fixture(scope="session")
def diabetes(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("exported") / "diabetes"
    done = script("train", "experiment=diabetes", *QUICK[:2], "trainer.max_epochs=5", f"folder={run}")
    assert done.returncode == 0, done.stderr
    export(script, run, "onnx")
    return run


@pytest.fixture(scope="session")
def gpt(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("exported") / "gpt"
    done = script("train", *GPT, *SMALL, *QUICK[:2], f"folder={run}")
    assert done.returncode == 0, done.stderr
    export(script, run, "[onnx,int4,int8-static]")
    return run
