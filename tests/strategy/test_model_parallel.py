import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script, max_difference, saved_weights

from boltcutter.checkpoint.load import load

# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors to a whole step.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
FSDP2 = ["trainer=fsdp2", "trainer.accelerator=cpu"]
TEXT = ["data=text", "model=gpt", "task=language", "data.shape=[16]", "model.hidden_size=32", "trainer.max_steps=4"]


@pytest.fixture(scope="module")
def half(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch on two ranks with sharded weights, and a full checkpoint."""
    folder = tmp_path_factory.mktemp("half") / "run"
    words = [*OVERRIDES, *FSDP2, "trainer.devices=2", "trainer.max_epochs=1", "test=false"]
    done = script("train", *words, f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_that_share_a_model_train_as_one_process(
    script: Script, alone: Path, tmp_path: Path, ranks: int, each: int
) -> None:
    words = [*OVERRIDES, *FSDP2, f"trainer.devices={ranks}", f"trainer.strategy.tensor_parallel_size={each}"]
    done = script("train", *words, f"folder={tmp_path}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert max_difference(alone, tmp_path) < 1e-6
    tables = []
    for folder in (alone, tmp_path):
        with open(folder / "evaluation" / "test" / "predictions.csv", newline="") as file:
            tables.append([(row["index"], row["prediction"]) for row in csv.DictReader(file)])
    assert tables[0] == tables[1]  # each sample once


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small language model."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "files").mkdir()
    for name in "abcdefghijkl":
        (folder / "files" / f"{name}.txt").write_text("".join(f"{name}{n} is {n * n}\n" for n in range(200)))
    return [*TEXT, f"data.path={folder}/files", f"data.cache_dir={folder}/cache", "test=false"]


ODD = ["model.num_kv_heads=2", "model.bias=true", "model.norm=layernorm", "model.position=learned"]
GELU = ["model.mlp=gelu", "model.tie_embeddings=false"]


@pytest.mark.parametrize(
    ("model", "ranks", "each"),
    [
        ([], 2, 1),
        ([*ODD, "model.activation_checkpointing=true"], 2, 2),
        pytest.param([], 4, 2, marks=pytest.mark.slow),
        pytest.param(GELU, 2, 2, marks=pytest.mark.slow),
        pytest.param(ODD, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_language_model_that_is_cut_trains_as_one_process(
    script: Script, text: list[str], tmp_path: Path, model: list[str], ranks: int, each: int
) -> None:
    cut = [*FSDP2, f"trainer.devices={ranks}", f"trainer.strategy.tensor_parallel_size={each}"]
    for name, more in (("one", []), ("cut", cut)):
        done = script(
            "train", *OVERRIDES, *text, *model, *more, f"folder={tmp_path}/{name}", ranks=ranks if more else 0
        )
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "cut") < 1e-6


@pytest.mark.parametrize(
    ("parts", "then", "ranks"),
    [
        (True, ["trainer=default", "trainer.accelerator=cpu"], 0),
        pytest.param(False, ["trainer=default", "trainer.accelerator=cpu"], 0, marks=pytest.mark.slow),
        pytest.param(True, ["trainer.strategy.tensor_parallel_size=1"], 2, marks=pytest.mark.slow),
        pytest.param(True, ["trainer.devices=4"], 4, marks=pytest.mark.slow),
        pytest.param(False, ["trainer.devices=4"], 4, marks=pytest.mark.slow),
    ],
)
def test_matrices_of_several_in_one_are_cut_otherwise_on_resume(
    script: Script, text: list[str], tmp_path: Path, parts: bool, then: list[str], ranks: int
) -> None:
    cut = [*FSDP2, "trainer.devices=2", "trainer.strategy.tensor_parallel_size=2"]
    for name, more in (("one", []), ("cut", [*cut, f"trainer.strategy.save_distributed_checkpoint={parts}".lower()])):
        words = [*OVERRIDES, *text, *more, f"folder={tmp_path}/{name}", "trainer.max_steps=2"]
        done = script("train", *words, ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    for name, more in (("one", []), ("cut", then)):
        words = [f"resume={tmp_path}/{name}", "trainer.max_steps=4", *more]
        done = script("train", *words, ranks=ranks if more else 0)
        assert done.returncode == 0, done.stderr
    ours, theirs = load(tmp_path / "cut" / "checkpoints" / "last.ckpt"), saved_weights(tmp_path / "one")
    torch.testing.assert_close(dict(ours["state_dict"]), theirs, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def parts(script: Script, half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its second epoch on four ranks, with a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    shutil.copytree(half, folder)
    words = [f"resume={folder}", "trainer.max_epochs=2", "trainer.devices=4"]
    done = script("train", *words, "trainer.strategy.save_distributed_checkpoint=true", ranks=4)
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "checkpoints").glob("last.ckpt.shards-*/__?_0.distcp"))) == 4
    return folder


def test_ranks_write_their_parts_of_what_one_process_writes(alone: Path, parts: Path) -> None:
    ours, theirs = (load(folder / "checkpoints" / "last.ckpt") for folder in (parts, alone))
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(dict(ours["state_dict"]), dict(theirs["state_dict"]), rtol=0, atol=1e-6)
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"][0]["params"] == other["param_groups"][0]["params"]
    torch.testing.assert_close(mine["state"], other["state"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("written", "then", "ranks"),
    [
        ("whole", ["trainer=default", "trainer.accelerator=cpu"], 0),
        ("parts", ["trainer=default", "trainer.accelerator=cpu"], 0),
        ("parts", ["trainer.devices=2", "trainer.strategy.save_distributed_checkpoint=false"], 2),
        pytest.param("whole", ["trainer.devices=1"], 1, marks=pytest.mark.slow),
        pytest.param("parts", ["trainer.devices=4"], 4, marks=pytest.mark.slow),
        pytest.param("parts", ["trainer.strategy.tensor_parallel_size=2"], 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    script: Script, alone: Path, half: Path, parts: Path, tmp_path: Path, written: str, then: list[str], ranks: int
) -> None:
    expected, folder = tmp_path / "alone", tmp_path / "run"
    shutil.copytree(alone, expected)
    shutil.copytree(half if written == "whole" else parts, folder)
    epochs = f"trainer.max_epochs={2 if written == 'whole' else 3}"
    for words, count in (([f"resume={folder}", *then], ranks), ([f"resume={expected}", "test=false"], 0)):
        if words[0] == f"resume={folder}" or written == "parts":
            done = script("train", *words, epochs, ranks=count)
            assert done.returncode == 0, done.stderr
    ours, theirs = (load(place / "checkpoints" / "last.ckpt")["state_dict"] for place in (folder, expected))
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=1e-6)
    left = [path.name for path in sorted((folder / "checkpoints").glob("last*"))]
    assert len(left) == 1 + (written == "parts" and ranks == 4)  # and nothing of what was there before


def test_one_process_evaluates_parts_and_begins_from_them(
    script: Script, alone: Path, parts: Path, tmp_path: Path
) -> None:
    done = script("evaluate", f"run={parts}", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    told = json.loads((alone / "record.json").read_text())["test"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == pytest.approx(told, abs=1e-5)
    words = [*OVERRIDES, f"init_from={parts}/checkpoints/best.ckpt", f"folder={tmp_path}/run", "trainer.max_steps=1"]
    done = script("train", *words, "test=false")
    assert done.returncode == 0, done.stderr
    assert "init_from: " not in done.stdout  # all of it fits


def test_a_non_finite_gradient_stops_all_ranks_with_a_one_line_error(script: Script, tmp_path: Path) -> None:
    words = [*OVERRIDES, *FSDP2, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *words, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert ": the gradient of model.hidden.0.weight" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.strategy.save_distributed_checkpoint=true", "checkpoint_io.asynchronous=true"],
            "; set checkpoint_io.asynchronous=false",
        ),
        (["trainer.strategy.cpu_offload=true"], "; set it to false"),
        pytest.param(["callback=[default,ema]"], "callback.ema: ", marks=pytest.mark.slow),
        (["trainer=fsdp"], "trainer.strategy=fsdp, trainer.accelerator=cpu: "),
        (["trainer=deepspeed"], "trainer"),
        (["model=convnet"], "ConvNet has no method shard(mesh)"),
        (["model.norm=batchnorm", "trainer.strategy.tensor_parallel_size=2"], "does not support BatchNorm1d"),
        (
            ["trainer.strategy.data_parallel_size=3", "data.batch_size=66"],
            "their product is not 2, the number of ranks",
        ),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(
    script: Script, tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = script("train", *OVERRIDES, *FSDP2, "trainer.devices=2", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert message in done.stderr
