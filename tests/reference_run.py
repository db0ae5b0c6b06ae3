"""The reference run that tests of strategies compare with, and a small text to train language models on."""

from pathlib import Path

import pytest
from conftest import Script


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the module's ``OVERRIDES`` in one process."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    done = script("train", *request.module.OVERRIDES, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small language model."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "files").mkdir()
    for name in "abcdefghijkl":
        (folder / "files" / f"{name}.txt").write_text("".join(f"{name}{n} is {n * n}\n" for n in range(200)))
    model = ["data=text", "model=gpt", "task=language", "data.shape=[16]", "model.hidden_size=32"]
    paths = [f"data.path={folder}/files", f"data.cache_dir={folder}/cache"]
    return [*model, *paths, "trainer.max_steps=4", "test=false"]
