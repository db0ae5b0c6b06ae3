import json
from pathlib import Path

import pytest
from conftest import ROOT

from boltcutter.export.card import find_license
from boltcutter.export.runner import sha256
from boltcutter.project import Project


def test_the_card_describes_inputs_outputs_and_origin(digits: Path) -> None:
    card = json.loads((digits / "export" / "onnx" / "card.json").read_text())
    (given,), (found,) = card["inputs"], card["outputs"]
    assert (given["name"], given["shape"], given["dtype"]) == ("input", ["batch", 1, 8, 8], "uint8")
    assert (found["name"], found["shape"], found["dtype"]) == ("probabilities", ["batch", 10], "float32")
    assert card["classes"] == [str(digit) for digit in range(10)]
    record = json.loads((digits / "record.json").read_text())
    assert (card["run"]["id"], card["commit"], card["test"]) == (record["id"], record["git"]["commit"], record["test"])
    assert card["license"] == "MIT"
    assert card["verified"]["metric"] == "accuracy"
    for name, facts in card["files"].items():
        assert facts["sha256"] == sha256(digits / "export" / "onnx" / name)


@pytest.mark.slow
def test_the_card_of_a_language_model_names_its_cache(gpt: Path) -> None:
    card = json.loads((gpt / "export" / "onnx" / "card.json").read_text())
    assert ([given["name"] for given in card["inputs"]], len(card["outputs"])) == (["tokens"], 1)
    key = {"input": "past_key_values.0.key", "output": "present.0.key", "shape": ["batch", 4, "past", 16]}
    assert card["cache"][0] == key
    assert len(card["cache"]) == 2


def test_the_license_is_that_of_the_project(tmp_path: Path) -> None:
    assert find_license(Project.at(ROOT)) == "MIT"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nlicense = {text = "Apache-2.0"}\n')
    assert find_license(Project(tmp_path, None)) == "Apache-2.0"
