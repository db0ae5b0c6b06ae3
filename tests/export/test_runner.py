import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from boltcutter.export import runner

PROGRAM = """
import sys
import numpy as np
from runner import Runner
run = Runner(sys.argv[1])
assert not {"torch", "lightning", "boltcutter"} & set(sys.modules)
for size in (1, 7):
    (found,) = run(np.zeros((size, 1, 8, 8), np.uint8))
    assert found.shape == (size, 10) and np.allclose(found.sum(axis=1), 1, atol=1e-5)
print(run.card["classes"])
"""


def test_a_copy_runs_without_the_library(digits: Path, tmp_path: Path) -> None:
    shutil.copy(runner.__file__, tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(digits / "export" / "onnx")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[str(digit) for digit in range(10)]}\n"


def test_an_export_without_a_cache_refuses_one(digits: Path) -> None:
    with pytest.raises(ValueError, match="has no cache; give all tokens in each call"):
        runner.Runner(digits / "export" / "onnx")(np.zeros((1, 1, 8, 8), np.uint8), cache=[])


CARD = {"format": "onnx", "program": None, "files": {}, "inputs": [], "outputs": []}


def test_an_engine_that_the_card_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"card.json is missing.*; give the folder"):
        runner.Runner(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({**CARD, "format": "safetensors"}))
    with pytest.raises(ValueError, match="holds only weights; use another format"):
        runner.Runner(tmp_path)


@pytest.mark.parametrize(("name", "listed", "digest"), [("../a", "../a", "1"), ("a", "a", None), ("a", "b", "1")])
def test_a_card_cannot_name_a_file_elsewhere(tmp_path: Path, name: str, listed: str, digest: str | None) -> None:
    (tmp_path / "card.json").write_text(json.dumps({**CARD, "program": name, "files": {listed: {"sha256": digest}}}))
    with pytest.raises(ValueError, match="names a file that is not listed, or outside of its folder"):
        runner.read_card(tmp_path)


def test_a_card_that_would_fill_the_memory_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text("[" + "[]," * runner.MAX_LISTS + "1]")
    with pytest.raises(ValueError, match=r"card\.json is damaged \(ValueError\('more than 1048576 lists and objects"):
        runner.Runner(tmp_path)


@pytest.mark.parametrize(
    "card",
    [
        *("", "[]", "{}", '{"program": "a", "files": 1}', "[" * 10**5, '{"files": {"a": {}}}'),
        *(json.dumps({**CARD, "program": {}}), json.dumps({**CARD, "format": None})),
        *(json.dumps({**CARD, key: value}) for key in ("inputs", "outputs", "cache") for value in (1, [1], [{}])),
        *(json.dumps({**CARD, key: [{"shape": None}]}) for key in ("inputs", "outputs", "cache")),
    ],
)
def test_a_damaged_card_ends_in_one_line(tmp_path: Path, card: str) -> None:
    (tmp_path / "card.json").write_text(card)
    with pytest.raises(ValueError, match=r"card\.json is damaged \(.*\); export it again") as error:
        runner.Runner(tmp_path)
    assert "\n" not in str(error.value)
