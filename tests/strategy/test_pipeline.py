import csv
from pathlib import Path

import pytest
from conftest import QUICK, Script, apart

# Adam's first steps go by the sign of the gradient, and blow rounding up to a whole step.
WORDS = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
PIPELINE = ["trainer=pipeline", "trainer.accelerator=cpu"]
TEXT = ["data=text", "model=gpt", "task=language", "data.shape=[16]", "model.width=32", "trainer.max_steps=4"]


def table(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as rows:
        return list(csv.DictReader(rows))


@pytest.fixture(scope="module")
def staged(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staged") / "run"
    done = script("train", *WORDS, *PIPELINE, "trainer.devices=2", f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_stages_train_as_one_process(alone: Path, staged: Path) -> None:
    assert apart(alone, staged) < 1e-6


def test_what_is_logged_is_that_of_one_process(alone: Path, staged: Path) -> None:
    ours, theirs = table(staged / "metrics.csv"), table(alone / "metrics.csv")
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.keys() - {n for n in mine if n.startswith("throughput/")}:
            assert mine[name] == other[name] or float(mine[name]) == pytest.approx(float(other[name]), abs=1e-5), name


def test_each_sample_is_tested_once(alone: Path, staged: Path) -> None:
    ours, theirs = (table(folder / "evaluation" / "test" / "predictions.csv") for folder in (staged, alone))
    assert [(row["index"], row["prediction"]) for row in ours] == [(row["index"], row["prediction"]) for row in theirs]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([*PIPELINE, "trainer.devices=2"], ["trainer=default", "trainer.accelerator=cpu"]),
        (["trainer.devices=1"], [*PIPELINE, "trainer.devices=2"]),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=3"], marks=pytest.mark.slow),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=1"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_other_stages(
    script: Script, alone: Path, tmp_path: Path, first: list[str], then: list[str]
) -> None:
    def ranks(words: list[str]) -> int:
        return next((int(word[-1]) for word in words if word.startswith("trainer.devices=")), 1)

    done = script(
        "train", *WORDS, *first, "trainer.max_epochs=1", "test=false", f"folder={tmp_path}", ranks=ranks(first)
    )
    assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}", *then, "trainer.max_epochs=2", ranks=ranks(then))
    assert done.returncode == 0, done.stderr
    assert apart(alone, tmp_path) < 1e-6


def test_a_language_model_whose_ends_share_weights_trains_as_one_process(script: Script, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in "abcdefghijkl":
        (tmp_path / "text" / f"{name}.txt").write_text("".join(f"{name}{n} is {n * n}\n" for n in range(200)))
    text = [*TEXT, f"data.path={tmp_path}/text", f"data.cache={tmp_path}/cache", "test=false"]
    text += ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"]
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2", "model.recompute=true"])):
        done = script("train", *WORDS, *text, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6


def test_a_gradient_that_is_not_finite_stops_all_ranks_in_one_line(script: Script, tmp_path: Path) -> None:
    words = [*WORDS, *PIPELINE, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *words, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count(": the gradient of model.hidden.0.weight") == 2
