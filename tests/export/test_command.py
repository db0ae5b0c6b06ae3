import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from conftest import QUICK, ROOT, Script
from third_party import gallery
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.assembly.assemble import Components
from boltcutter.data.digits import Digits
from boltcutter.export.command import calibration, check_drop, has_split, save_results
from boltcutter.export.settings import ExportError
from boltcutter.export.verify import Result
from boltcutter.topology import Topology


def results(run: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((run / "export" / "export.json").read_text())["results"])


def test_exports_of_a_classifier_equal_the_original(digits: Path) -> None:
    found = results(digits)
    assert list(found) == ["fp32", "torch", "onnx", "int8-static", "safetensors"]
    recorded = json.loads((digits / "record.json").read_text())["test"]["test/accuracy"]
    assert found["fp32"]["value"] == pytest.approx(recorded)
    assert found["torch"]["value"] == found["onnx"]["value"] == found["fp32"]["value"]  # the record has float32
    assert max(found["torch"]["max_difference"], found["onnx"]["max_difference"]) < 1e-5
    assert 0 < found["int8-static"]["max_difference"] < 0.3
    assert found["int8-static"]["size"] < 0.4 * found["onnx"]["size"]
    assert all(found[name]["latency"].keys() == {"1", "32"} for name in ("fp32", "torch", "onnx"))
    assert found["safetensors"]["latency"] is None
    report = (digits / "report.html").read_text()
    assert "int8-static" in report


@pytest.mark.slow
def test_exports_of_a_regression_and_a_language_model_equal_the_original(diabetes: Path, gpt: Path) -> None:
    for run, metric, name in ((diabetes, "rmse", "test/rmse"), (gpt, "loss", "test/loss")):
        found = results(run)
        recorded = json.loads((run / "record.json").read_text())["test"][name]
        assert found["fp32"]["metric"] == metric
        assert found["fp32"]["value"] == pytest.approx(recorded, rel=1e-4)
        assert found["onnx"]["value"] == pytest.approx(recorded, rel=1e-4)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "1", '{"results": 1}', '{"results": {"fp32": 1}, "split": "test"}'),
        *('{"results": {"fp32": {"value": 0.5}}}', '{"results": [], "split": "test"}', "\xff", "[" * 99999),
    ],
)
def test_damaged_results_are_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text(content, encoding="latin-1")
    save_results(tmp_path, {"fp32": Result(1, "accuracy", 0.5)}, "test", "best.ckpt")
    assert list(results(tmp_path)) == ["fp32"]


def test_results_of_other_formats_are_kept(script: Script, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "run")
    done = script("export", f"run={os.path.relpath(tmp_path / 'run', ROOT)}", "export=safetensors")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run").keys() == results(digits).keys()


class EmptyTest(L.LightningDataModule):
    def train_dataloader(self) -> list[Any]:
        return []

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2, 3)))

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(0, 3)))


def test_a_split_without_samples_is_not_used() -> None:
    trainer = L.Trainer(logger=False, enable_checkpointing=False)
    components = Components(trainer, EmptyTest(), L.LightningModule(), Topology.of(trainer))
    assert [split for split in ("test", "val", "train") if has_split(components, split)] == ["val"]


class Shuffled(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(300.0)[:, None], torch.arange(300) % 3), 8, shuffle=True)


@pytest.mark.parametrize("data", [Digits(batch_size=8), Shuffled()], ids=lambda data: type(data).__name__)
def test_calibration_reads_the_same_training_samples_each_time(data: Any) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    components = Components(trainer, data, L.LightningModule(), Topology.of(trainer))
    program: Any = SimpleNamespace(split=lambda batch: ((batch[0],), batch[1]), with_cache=lambda inputs: inputs)
    loader = data.loader("train") if isinstance(data, Digits) else data.train_dataloader()
    known = torch.cat([inputs for inputs, _ in loader]).flatten(1).tolist()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(torch.cat([inputs for (inputs,) in calibration(components, program, "test", 40)]))
    assert torch.equal(*found)
    assert all(row in known for row in found[0].flatten(1).tolist())


def test_a_drop_beyond_the_bound_fails() -> None:
    found = {"fp32": Result(1, "accuracy", 0.98), "int4": Result(1, "accuracy", 0.97, drop=1.0)}
    check_drop(found, 1.0)
    with pytest.raises(ExportError, match=r"export=int4: accuracy 0.9700 .*; "):
        check_drop(found, 0.5)
    with pytest.raises(ExportError):
        check_drop({**found, "int4": Result(1, "loss", float("nan"), drop=float("nan"))}, 0.5)


@pytest.mark.slow
def test_a_drop_beyond_the_bound_is_an_exit_status(script: Script, gpt: Path, tmp_path: Path) -> None:
    shutil.copytree(gpt, tmp_path / "run")
    done = script("export", f"run={tmp_path}/run", "export=int8-static", "export.max_drop=0", "ckpt=best")
    drop = results(tmp_path / "run")["int8-static"]["drop"]
    assert done.returncode == (1 if drop > 0 else 0)
    assert done.stderr.count("\n") == done.returncode


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run={run}"], "export: not set; give export="),
        (["run={run}", "export=onx"], "export=onx: no such option; did you mean onnx?"),
        (
            ["run={run}", "export=onnx", "export.formats.onnx.opst=3"],
            "onnx.opst: ONNX takes no such argument",
        ),
        (["run={run}", "export=onnx", "export.max_drop=-1"], "export.max_drop=-1"),
        (["run={run}", "export=onnx", "ckpt=nowhere"], "ckpt=nowhere: "),
        (["run={run}/nowhere", "export=onnx"], "no run there"),
        (["export=onnx"], "run is not set"),
    ],
)
def test_mistakes_are_one_line(script: Script, trained: Path, overrides: list[str], message: str) -> None:
    done = script("export", *(override.format(run=trained) for override in overrides))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_without_checkpoint_is_named(script: Script, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    done = script("export", f"run={tmp_path}/run", "export=onnx")
    assert done.returncode == 2
    assert re.search(r"ckpt=best: .*none yet", done.stderr)


@pytest.mark.slow
def test_a_sharded_checkpoint_is_exported(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sharded = ["trainer=fsdp2", "trainer.accelerator=cpu", "trainer.devices=2", "model=mlp"]
    done = script("train", *QUICK, *sharded, f"folder={run}", ranks=2)
    assert done.returncode == 0, done.stderr
    done = script("export", f"run={run}", "export=[torch,int8]", timeout=600)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((run / "record.json").read_text())["test"]["test/accuracy"]
    assert results(run)["torch"]["value"] == pytest.approx(recorded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", "own_loaders", "multilabel", "segmentation"])
def test_any_module_is_exported_and_predicts_as_its_checkpoint(
    script: Script, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    limits = ["+trainer.limit_train_batches=3", "+trainer.limit_val_batches=1", "test=false"]
    given = [*gallery.overrides(name), *QUICK, *limits, f"folder={tmp_path}/run"]
    for command in (["train", *given], ["export", f"run={tmp_path}/run", "export=onnx"]):
        done = script(*command, fresh=True, timeout=300)
        assert done.returncode == 0, done.stderr
    outputs = []
    for source in ("ckpt=best", "export=onnx"):
        done = script("predict", f"run={tmp_path}/run", source, f"output={tmp_path}/{source}.csv", fresh=True)
        assert done.returncode == 0, done.stderr
        saved = sorted(tmp_path.glob(f"{source}.*"))[0]
        outputs.append(torch.load(saved) if saved.suffix == ".pt" else pd.read_csv(saved))
    expected, found = outputs
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(expected, found, atol=1e-4)
    else:
        torch.testing.assert_close(expected, found, atol=1e-4, rtol=1e-4)


def test_an_export_is_pushed_only_with_a_token(script: Script, digits: Path, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    done = script("export", f"run={digits}", "export=safetensors", "export.push=me/digits", env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: export.push=me/digits: not logged in to the Hub; run `hf auth login`")
