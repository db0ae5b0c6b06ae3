from pathlib import Path

import pytest
from conftest import Script

from boltcutter.config.errors import ConfigError
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
