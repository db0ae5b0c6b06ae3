from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import Script
from third_party.folds import Foreign, Native

from boltcutter.config.errors import ConfigError
from boltcutter.evaluation import folds
from boltcutter.evaluation.folds import FoldContents, SplitContents, find_fault, read_fold
from boltcutter.project import Project
from boltcutter.search.plan import planned

ENV = {"PYTHONPATH": "tests"}
REMEDY = "boltcutter.split_indices(…, num_folds=num_folds, fold=fold)"


def options(module: str, fault: str = "", dataset: str = "tensors") -> list[str]:
    data = ["data=synthetic", f"data._target_=third_party.folds.{module}", f"data.dataset={dataset}"]
    return [
        *data,
        f"data.fault={fault or 'none'}",
        "data.shape=[4]",
        "data.num_classes=2",
        "model=linear",
        "logger=null",
    ]


@pytest.mark.parametrize("module", ["Native", "Foreign"])
@pytest.mark.parametrize("fault", ["ignored", "overlap", "redrawn", "uncovered"])
def test_a_cross_validation_of_wrong_folds_is_refused(module: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"^data.num_folds=3: .*; in third_party.folds.") as caught:
        planned(Project.find(__file__), ["search=kfold", "search.folds=3", *options(module, fault)])
    assert REMEDY in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["Native", "Foreign"])
def test_a_cross_validation_of_correct_folds_is_accepted(module: str) -> None:
    assert planned(Project.find(__file__), ["search=kfold", "search.folds=3", *options(module)]).total == 3


def test_a_run_with_a_fold_is_checked(script: Script, tmp_path: Path) -> None:
    fold = ["+data.num_folds=3", "+data.fold=2", f"folder={tmp_path / 'run'}", "trainer.max_epochs=1", "report=false"]
    done = script("train", *options("Foreign", "ignored"), *fold, env=ENV)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: data.num_folds=3: folds 2 and 0 share 12 of 12 validation samples; in third")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "record.json").exists()
    done = script("train", *options("Foreign"), *fold, env=ENV)
    assert done.returncode == 0, done.stderr


KINDS = ["tensors", "subset", "samples"]
CASES = [
    *[(Native, kind) for kind in ("batched", *KINDS)],
    *[(Foreign, kind) for kind in (*KINDS, "sampler", "batches")],
]


def faults(module: Any, kind: str, fault: str, some: range = range(3)) -> str | None:
    """What is found in some of three folds."""
    found = {}
    for fold in some:
        data = module(dataset=kind, fault=fault, num_folds=3, fold=fold)
        data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        data.prepare_data()
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


def contents(train: str, val: str, *, is_complete: bool = True) -> FoldContents:
    """A fold whose samples are the letters of its splits."""
    counted = [Counter(letter.encode() for letter in split) for split in (train, val)]
    return FoldContents(*(SplitContents(c, c.total() if is_complete else None) for c in counted))


def test_the_limits_of_what_is_a_fault() -> None:
    # The same samples: each must be validated, also one of twenty, and equal ones do not stand for others.
    letters = "abcdefghijklmnopqrst"
    two = {0: contents(letters[10:], letters[:10]), 1: contents(letters[:10], letters[10:])}
    assert find_fault(two, 2) is None
    two[1] = contents(letters[:10] + "t", letters[10:-1])
    assert find_fault(two, 2) == "1 of 20 samples are in no fold's val split"
    assert find_fault(two, 3) is None  # another fold may validate it
    assert (
        find_fault({0: contents("ab", "a"), 1: contents("ab", "a")}, 2) == "1 of 2 samples are in no fold's val split"
    )
    # Other contents in each fold, as of scaled samples: only their number counts, of which a tenth may be missing.
    assert find_fault({0: contents("cd", "ab"), 1: contents("ef", "gb")}, 2) is None
    scaled = {0: contents(letters[10:], letters[:10]), 1: contents(letters[:10].upper() + "T", letters[10:-1].upper())}
    assert find_fault(scaled, 2) is None
    few = letters[:10].upper() + "RST", letters[10:-3].upper()
    assert find_fault(scaled | {1: contents(*few)}, 2) == "3 of 20 samples are in no fold's val split"
    assert find_fault(scaled | {1: contents(*few, is_complete=False)}, 2) is None  # the rest was not read
    # Streams: half of the samples may be equal.
    stream = {0: contents("abef", "abcd", is_complete=False), 1: contents("cdef", "efgh", is_complete=False)}
    assert find_fault(stream, 2) is None
    stream[0] = contents("abcef", "abcd", is_complete=False)
    assert find_fault(stream, 2) == "3 of 4 validation samples of fold 0 are in its train split"


@pytest.mark.parametrize("fault", ["", "ignored"])
def test_the_time_to_read_is_bounded(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "READ_SECONDS", 0.0)
    monkeypatch.setattr(folds, "CHUNK", 8)
    assert bool(faults(Native, "tensors", fault)) is (fault == "ignored")
    data = Native(num_folds=3)
    data.setup("fit")
    assert read_fold(data).train.fraction == 8 / 40


def test_reading_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    faults(Native, "subset", "")
    faults(Foreign, "sampler", "")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_search_over_folds_is_checked_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"data.num_folds: Synthetic takes no such argument"):
        planned(Project.find(__file__), ["search=kfold", "data=synthetic"])
    with pytest.raises(
        ConfigError, match=r"^data.num_folds=150, but the number of samples of the smallest class is 148;"
    ):
        planned(Project.find(__file__), ["search=kfold", "search.folds=150"])
    assert planned(Project.find(__file__), ["search=kfold", "search.folds=3"]).total == 3
