import base64
import json
from pathlib import Path

import pytest
import torch
from programs import BUGS
from programs.running import find

from boltcutter.diagnosis import Invariants
from boltcutter.diagnosis.facts import describe_sample, numbers_of
from boltcutter.run.folder import read_record


@pytest.mark.filterwarnings("ignore")
def test_a_finding_has_the_numbers_of_what_it_names_and_a_sample(tmp_path: Path) -> None:
    watch = Invariants(folder=tmp_path)
    findings = {f.check: f for f in find(BUGS["sigmoid_of_large"], tmp_path, watch)}
    evidence = findings["range"].evidence
    named = {each["of"]: each for each in evidence["numbers"]}
    assert named["target of mse_loss"]["highest"] > 1
    assert named["part 0 of the batch"]["shape"]
    assert float(evidence["sample"]["fields"]["1"].split(",")[0]) > 1  # its target
    json.dumps(evidence)
    (recorded,) = [each for each in read_record(tmp_path)["findings"] if each["check"] == "range"]
    assert recorded["evidence"] == evidence


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_a_line_names_have_their_norms_and_gradient(tmp_path: Path) -> None:
    findings = {f.check: f for f in find(BUGS["no_grad_backbone"], tmp_path)}
    numbers = findings["cut-gradient"].evidence["numbers"]
    assert numbers
    assert all(each["gradient"] == "none" and each["rms"] == each["rms_at_start"] > 0 for each in numbers)


def test_a_sample_is_a_picture_and_fields() -> None:
    found = describe_sample([torch.linspace(0, 1, 64 * 64).reshape(1, 64, 64), torch.tensor(3)])
    pixels = base64.b64decode(found["picture"]["pixels"])
    assert found["picture"]["shape"] == [1, 32, 32]
    assert len(pixels) == 32 * 32
    assert pixels[0] < 10 < 240 < pixels[-1]
    assert found["fields"] == {"1": "3"}
    text = describe_sample({"text": "a" * 1000, "tokens": torch.arange(20)})["fields"]
    assert len(text["text"]) == 200
    assert text["tokens"] == "0, 1, 2, 3, 4, 5, 6, 7, … (20)"


def test_numbers_leave_out_what_is_not_finite() -> None:
    found = numbers_of(torch.tensor([1.0, float("nan"), 3.0]))
    assert (found["non_finite"], found["lowest"], found["highest"], found["mean"]) == (1, 1.0, 3.0, 2.0)
    assert numbers_of(torch.zeros(0, 2)) == {"shape": [0, 2], "dtype": "float32"}
