from typing import Any

import lightning as L
import pytest
import torch
from third_party.folds import Foreign, Native

from boltcutter.data import fold_contents
from boltcutter.data.fold_contents import find_fault, read_fold

KINDS = ["tensors", "subset", "samples"]
CASES = [
    *[(Native, kind) for kind in ("batched", *KINDS)],
    *[(Foreign, kind) for kind in (*KINDS, "sampler")],
]


def faults(module: Any, kind: str, fault: str, folds: range = range(3)) -> str | None:
    """What is found in some of three folds."""
    found = {}
    for fold in folds:
        data = module(dataset=kind, fault=fault, num_folds=3, fold=fold)
        data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        data.setup("fit")
        found[fold] = read_fold(data)
    return find_fault(found, 3)


@pytest.mark.parametrize(("module", "kind"), [*CASES, (Native, "scaled"), (Foreign, "scaled")])
def test_correct_folds_are_accepted(module: Any, kind: str) -> None:
    assert faults(module, kind, "") is None
    assert faults(module, kind, "repeated") is None  # equal samples, some of them on both sides
    assert faults(module, kind, "", range(2)) is None  # the fold of a run, and the next one


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ignored", "folds 0 and 1 share 12 of 12 validation samples"),
        ("ignored overlap", "folds 0 and 1 share 12 of 12 validation samples"),
        ("overlap", "20 of 20 validation samples of fold 0 are in its train split"),
        ("redrawn", "validation samples"),
    ],
)
@pytest.mark.parametrize(("module", "kind"), CASES)
def test_faults_are_found_in_any_dataset(module: Any, kind: str, fault: str, message: str) -> None:
    assert message in str(faults(module, kind, fault))
    assert message in str(faults(module, kind, fault, range(2)))


@pytest.mark.parametrize(("module", "kind"), [*CASES, (Native, "scaled")])
def test_folds_cover_the_data(module: Any, kind: str) -> None:
    assert faults(module, kind, "uncovered") == "48 of 60 samples are in no fold's val split"


@pytest.mark.parametrize(("module", "kind"), [(Native, "stream"), (Foreign, "stream"), (Native, "scaled")])
def test_what_cannot_be_compared_completely_is_compared_in_part(module: Any, kind: str) -> None:
    assert faults(module, kind, "") is None
    assert "folds 0 and 1 share 12 of 12" in str(faults(module, kind, "ignored"))


@pytest.mark.parametrize("fault", ["", "ignored"])
def test_the_time_to_read_is_bounded(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_contents, "READ_SECONDS", 0.0)
    monkeypatch.setattr(fold_contents, "CHUNK", 8)
    assert bool(faults(Native, "tensors", fault)) is (fault == "ignored")
    data = Native(num_folds=3)
    data.setup("fit")
    assert read_fold(data).train.fraction == 8 / 40


def test_reading_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    faults(Native, "subset", "")
    faults(Foreign, "sampler", "")
    assert torch.equal(torch.get_rng_state(), state)
