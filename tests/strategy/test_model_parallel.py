import csv
import shutil
from pathlib import Path

import pytest
from conftest import QUICK, Script, apart

# Adam's first steps go by the sign of the gradient, and blow rounding up to a whole step.
WORDS = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
FSDP2 = ["trainer=fsdp2", "trainer.accelerator=cpu"]
TEXT = ["data=text", "model=gpt", "task=language", "data.shape=[16]", "model.width=32", "trainer.max_steps=4"]


@pytest.fixture(scope="module")
def half(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch on two ranks that share the weights."""
    folder = tmp_path_factory.mktemp("half") / "run"
    words = [*WORDS, *FSDP2, "trainer.devices=2", "trainer.max_epochs=1", "test=false"]
    done = script("train", *words, f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_that_share_a_model_train_as_one_process(
    script: Script, alone: Path, tmp_path: Path, ranks: int, each: int
) -> None:
    words = [*WORDS, *FSDP2, f"trainer.devices={ranks}", f"trainer.strategy.tensor_parallel_size={each}"]
    done = script("train", *words, f"folder={tmp_path}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert apart(alone, tmp_path) < 1e-6
    tables = []
    for folder in (alone, tmp_path):
        with open(folder / "evaluation" / "test" / "predictions.csv", newline="") as file:
            tables.append([(row["index"], row["prediction"]) for row in csv.DictReader(file)])
    assert tables[0] == tables[1]  # each sample once


def test_a_language_model_cut_at_its_blocks_trains_as_one_process(script: Script, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in "abcdefghijkl":
        (tmp_path / "text" / f"{name}.txt").write_text("".join(f"{name}{n} is {n * n}\n" for n in range(200)))
    text = [*TEXT, f"data.path={tmp_path}/text", f"data.cache={tmp_path}/cache", "test=false"]
    for name, more in (("one", []), ("two", [*FSDP2, "trainer.devices=2"])):
        done = script("train", *WORDS, *text, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_ranks(
    script: Script, alone: Path, half: Path, tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    done = script("train", f"resume={folder}", "trainer.max_epochs=2", f"trainer.devices={ranks}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert apart(alone, folder) < 1e-6


def test_a_gradient_that_is_not_finite_stops_all_ranks_in_one_line(script: Script, tmp_path: Path) -> None:
    words = [*WORDS, *FSDP2, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *words, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert ": the gradient of model.hidden.0.weight" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trainer.strategy.save_distributed_checkpoint=true"], "only a single file can be verified"),
        (["trainer=fsdp"], "trainer: "),
        (["trainer=deepspeed"], "trainer"),
        (["model=convnet"], "ConvNet does not say how it is cut"),
        (["model.norm=batch", "trainer.strategy.tensor_parallel_size=2"], "with BatchNorm1d cannot be cut within"),
        (
            ["trainer.strategy.data_parallel_size=3", "data.batch_size=66"],
            "their product is not 2, the number of ranks",
        ),
    ],
)
def test_what_cannot_be_cut_is_told_in_one_line(script: Script, tmp_path: Path, words: list[str], text: str) -> None:
    done = script("train", *WORDS, *FSDP2, "trainer.devices=2", *words, f"folder={tmp_path}", ranks=2)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert text in done.stderr
