import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Script
from sklearn.metrics import accuracy_score, f1_score
from third_party.gallery import HERE

import boltcutter
from boltcutter.assembly.assemble import complete_config
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.callback.announced import Announced
from boltcutter.callback.prefetch import Prefetch
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.environment import announcement, hang
from boltcutter.evaluation.evaluate import assembled, count_samples, replaced
from boltcutter.evaluation.outcomes import WORST
from boltcutter.project import Project
from boltcutter.run import evaluations
from boltcutter.run.best import find_checkpoint

STOCHASTIC = [f"task={HERE}/task/diffusion.yaml", f"data={HERE}/data/jittered.yaml"]
ENV = {"PYTHONPATH": "tests"}
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


def test_metrics_match_the_predictions(trained: Path) -> None:
    scores = json.loads((trained / "evaluation" / "test" / "metrics.json").read_text())
    table = pd.read_csv(trained / "evaluation" / "test" / "predictions.csv")
    assert list(table["index"]) == list(range(270))  # each sample once
    assert scores["test/accuracy"] == pytest.approx(accuracy_score(table["target"], table["prediction"]), abs=1e-6)
    assert scores["test/f1"] == pytest.approx(f1_score(table["target"], table["prediction"], average="macro"), abs=1e-6)
    assert scores["test/loss"] == pytest.approx(table["loss"].mean(), abs=1e-6)


def test_all_samples_are_evaluated_and_counted(script: Script, trained: Path, tmp_path: Path) -> None:
    found = {}
    for split in ("train", "val", "test", "all"):
        ahead = ["callback.prefetch.batches=2"] if split == "all" else []  # which does not matter
        done = script("evaluate", f"run={trained}", f"split={split}", f"output={tmp_path}/{split}", *ahead)
        assert done.returncode == 0, done.stderr
        count = len(pd.read_csv(tmp_path / split / "predictions.csv"))
        shown = f"samples {count:,} of 1,797, the {split} split; split=all" if split != "all" else "samples 1,797 "
        assert shown in " ".join(done.stdout.split())
        found[split] = count, json.loads((tmp_path / split / "metrics.json").read_text())[f"{split}/accuracy"]
    counts, scores = zip(*found.values(), strict=True)
    assert counts[3] == sum(counts[:3]) == 1797
    assert scores[3] == pytest.approx(np.average(scores[:3], weights=counts[:3]), abs=1e-6)


def test_tables_are_consistent(trained: Path) -> None:
    folder = trained / "evaluation" / "test"
    matrix = pd.read_csv(folder / "confusion.csv", index_col="target").to_numpy()
    classes = pd.read_csv(folder / "classes.csv")
    assert matrix.sum() == 270
    assert list(classes["samples"]) == list(matrix.sum(axis=1))
    assert np.allclose(classes["recall"], matrix.diagonal() / matrix.sum(axis=1))


def test_the_worst_errors_are_saved_with_their_inputs(trained: Path) -> None:
    folder = trained / "evaluation" / "test"
    table = pd.read_csv(folder / "predictions.csv")
    with np.load(folder / "worst.npz") as worst:
        assert worst["inputs"].shape == (WORST, 1, 8, 8)
        assert worst["inputs"].dtype == np.uint8
        assert np.allclose(worst["loss"], np.sort(table["loss"])[::-1][:WORST])
        assert list(worst["target"]) == list(table["target"][worst["index"]])


def test_two_processes_give_the_same_metrics_as_one(script: Script, trained: Path, tmp_path: Path) -> None:
    tables, scores, before = [], [], evaluations.of_test(trained)
    for name, overrides, ranks in (("one", [], 0), ("two", TWO, 2)):
        given = [f"run={trained}", f"output={tmp_path / name}", "data.batch_size=32"]
        done = script("evaluate", *given, *overrides, ranks=ranks)
        assert done.returncode == 0, done.stderr
        scores.append(json.loads((tmp_path / name / "metrics.json").read_text()))
        tables.append(pd.read_csv(tmp_path / name / "predictions.csv"))
        assert "precision" in done.stdout
    assert scores[0]["test/accuracy"] == scores[1]["test/accuracy"]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    pd.testing.assert_frame_equal(*tables, atol=1e-5, rtol=1e-5)
    assert before[0]["checkpoint"] == "best.ckpt"  # by the training
    assert len(evaluations.of_test(trained)) == len(before) + 2
    assert f"evaluated {len(before) + 2} times\n" in done.stdout


def test_another_split_and_checkpoint(script: Script, trained: Path, tmp_path: Path) -> None:
    done = script("evaluate", f"run={trained}", "split=val", "ckpt=last", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "metrics.json").read_text())
    assert scores.keys() == {"val/loss", "val/accuracy", "val/f1"}
    known = json.loads((trained / "record.json").read_text())["metrics"]
    assert scores["val/accuracy"] == pytest.approx(known["val/accuracy"])


def test_the_training_split_is_evaluated_completely(script: Script, trained: Path, tmp_path: Path) -> None:
    done = script("evaluate", f"run={trained}", "split=train", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(tmp_path / "predictions.csv")) == 1257


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "run is not set"),
        (["runs/digits"], "run is not set; use run=<folder of a run>, as in run=runs/digits\n"),
        (["run=nowhere"], "nowhere: no run there"),
        (["run={trained}", "model=linear"], "its weights do not fit the model; remove overrides of the model"),
        (["run={trained}/record.json"], "record.json: no run there"),
        (["run={trained}", "split=tset"], "split=tset: expected train, val, test or all; did you mean test?"),
        (
            ["run={trained}", "ckpt=other.ckpt"],
            "ckpt=other.ckpt: no such file; did you mean last.ckpt? (checkpoints of the run: best.ckpt, last.ckpt)",
        ),
    ],
)
def test_errors_are_one_line(script: Script, trained: Path, overrides: list[str], message: str) -> None:
    done = script("evaluate", *(override.format(trained=trained) for override in overrides))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_without_a_monitor_is_evaluated_at_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    cfg = Settings({"folder": str(tmp_path), "checkpoints": f"{tmp_path}/checkpoints"})
    with pytest.raises(ConfigError, match="none yet"):
        find_checkpoint(cfg.place)
    torch.save({}, tmp_path / "checkpoints" / "last.ckpt")
    assert Path(find_checkpoint(cfg.place)).name == "last.ckpt"


def test_losses_are_cross_entropies(trained: Path) -> None:
    table = pd.read_csv(trained / "evaluation" / "test" / "predictions.csv")
    right = table[table["target"] == table["prediction"]]
    assert np.allclose(right["loss"], -np.log(right["confidence"]), atol=1e-4)


def scores_of(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "metrics.json").read_text()))


@pytest.mark.slow
def test_a_stochastic_module_has_the_metrics_of_training(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [f"folder={run}", "logger=null", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    done = script("train", *STOCHASTIC, *options, env=ENV)
    assert done.returncode == 0, done.stderr
    tested = scores_of(run / "evaluation" / "test")
    validated = pd.read_csv(run / "metrics.csv")["val/loss"].dropna().tolist()
    for arguments, name in (
        ([], "test"),
        ([], "test"),
        (["ckpt=last"], "test-last"),
        (["data.num_workers=1"], "test-data.num_workers=1"),
        (["split=val", "ckpt=last"], "val-last"),
    ):
        done = script("evaluate", f"run={run}", *arguments, env=ENV)
        assert done.returncode == 0, done.stderr
        assert f"{run}/evaluation/{name}\n" in done.stdout
        assert f"evaluation/{name}<" in (run / "report.html").read_text() or not arguments
    assert {path.name for path in (run / "evaluation").iterdir()} == {
        *("test", "test-last", "test-data.num_workers=1", "val-last", evaluations.FILE.name)
    }
    assert "split was evaluated 5 times, at 2 checkpoints (best.ckpt, last.ckpt)" in (run / "report.html").read_text()
    assert scores_of(run / "evaluation" / "test") == tested
    assert scores_of(run / "evaluation" / "test-data.num_workers=1")["test/loss"] == pytest.approx(tested["test/loss"])
    assert scores_of(run / "evaluation" / "val-last")["val/loss"] == pytest.approx(validated[-1])

    done = script("train", f"resume={run}", "trainer.max_epochs=4", env=ENV)
    assert done.returncode == 0, done.stderr
    assert scores_of(run / "evaluation" / "test-2") == tested  # the earlier test
    assert scores_of(run / "evaluation" / "test") == json.loads((run / "record.json").read_text())["test"] != tested

    predicted = []
    for name in ("one.csv", "two.csv"):
        done = script("predict", f"run={run}", f"output={tmp_path / name}", env=ENV)
        assert done.returncode == 0, done.stderr
        predicted.append((tmp_path / name).read_bytes())
    assert predicted[0] == predicted[1]


def test_an_evaluation_leaves_the_loaders_as_they_were() -> None:
    class Data(L.LightningDataModule):
        def test_dataloader(self) -> str:
            return "test"

        def val_dataloader(self) -> str:
            return "val"

    data = Data()
    with replaced(data, "test_dataloader", data.val_dataloader):
        assert data.test_dataloader() == "val"
    assert data.test_dataloader() == "test"
    data.test_dataloader = lambda: "own"  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), replaced(data, "test_dataloader", data.val_dataloader):
        raise KeyboardInterrupt
    assert data.test_dataloader() == "own"


FORECAST = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 12)
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def test_step(self, batch, batch_idx):
        predictions = self.net(batch[0])
        return {"predictions": predictions[..., None], "targets": batch[1][..., None],
                "losses": (predictions - batch[1]).square().mean(1)}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16, 12)), 8)
    test_dataloader = train_dataloader
"""


def test_a_forecast_is_plotted_against_the_truth(script: Script, tmp_path: Path) -> None:
    (tmp_path / "forecast.py").write_text(FORECAST)
    (tmp_path / "task.yaml").write_text("# Forecast.\n_target_: forecast.Forecast\n")
    overrides = [f"task={tmp_path}/task.yaml", "data=null", "logger=null", "trainer.max_epochs=1"]
    done = script("train", *overrides, f"folder={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    test = tmp_path / "run" / "evaluation" / "test"
    assert (test / "series.svg").read_text().count("<polyline") == 2 * 4
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Predictions and targets of four samples" in report
    assert 'data-scatter="0"' in report


def test_changed_code_is_reported_and_the_earlier_result_kept(script: Script, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    earlier = (folder / "evaluation" / "test" / "metrics.json").read_bytes()
    record = json.loads((folder / "record.json").read_text())
    settings = json.loads((folder / "evaluation" / "test" / "settings.json").read_text())
    assert settings["code"]["commit"] == record["git"]["commit"]
    for key, other in (("git", {"commit": "0" * 40, "changes": "1" * 16}), ("packages", {"torch": "0.1"})):
        record[key] |= other
    (folder / "record.json").write_text(json.dumps(record))
    settings["code"] |= record["git"] | {"commit": "0" * 40}
    (folder / "evaluation" / "test" / "settings.json").write_text(json.dumps(settings))
    done = script("evaluate", f"run={folder}")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert ["0" * 40 in line for line in lines] == [True, False, False]
    assert "torch" in lines[2]
    assert (folder / "evaluation" / "test" / "metrics.json").read_bytes() == earlier
    (new,) = folder.glob("evaluation/test-*/settings.json")
    code = json.loads(new.read_text())["code"]
    assert code["commit"] != "0" * 40
    assert bool(code["changes"]) == new.with_name("code.patch").is_file()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux names memory files in /proc")
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_what_is_done_with_a_run_is_watched_and_reads_ahead(trained: Path, tmp_path: Path, command: str) -> None:
    rest = ["timeout=60", "callback.prefetch.batches=1"]
    cfg, _ = load_evaluation_config(Project.find(__file__), {"run": str(trained)}, rest)
    with assembled(complete_config(cfg), tmp_path, command) as components:
        (found,) = hang.find(str(tmp_path.resolve()))
        found.close()
        assert (found.facts["attempt"][0], found.facts["timeout"]) == (command, 60)
        announcement.set_state("running")
        assert found.facts["pid"] == os.getpid()
        first, *others = components.trainer.callbacks  # type: ignore[attr-defined]
        assert isinstance(first, Announced)
        assert [callback.batches for callback in others if isinstance(callback, Prefetch)] == [1]
    announcement.withdraw()


@pytest.mark.parametrize(
    ("limit", "shown"), [(1.0, "50 of 60, the test split;"), (2, "32 of 50,"), (9, "50 of 50,"), (0.5, "32 of 50,")]
)
def test_samples_of_batches_that_are_left_out_are_not_counted(limit: float, shown: str) -> None:
    class Data(boltcutter.DataModule):
        def load(self) -> boltcutter.Splits:
            raise NotImplementedError

    data: Any = Data(batch_size=16)
    data.splits = boltcutter.Splits([0] * 5, [0] * 5, [0] * 50)  # type: ignore[arg-type]
    assert str(count_samples(data, "test", limit)).startswith(shown)
