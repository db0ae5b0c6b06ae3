import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import write_group, write_run, write_search
from scipy import stats

from boltcutter.analysis.comparison import Comparison, compare
from boltcutter.analysis.groups import read_group
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.significance import ALPHA
from boltcutter.cli import commands as cli

A = [0.901, 0.893, 0.912, 0.897, 0.905]
B = [0.911, 0.900, 0.919, 0.908, 0.911]  # better by 1.0, 0.7, 0.7, 1.1 and 0.6 points
NOISY = [0.921, 0.883, 0.915, 0.889, 0.911]  # by 2.0, -1.0, 0.3, -0.8 and 0.6
METRIC = "test/accuracy"


class Shell:
    """Runs the command in a project of its own, whose runs are in ``runs``."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.runs, self._capsys = root, root / "runs", capsys

    def __call__(self, *arguments: str, metric: str = METRIC) -> str:
        cli.main(["compare", "--metric", metric, *arguments])
        return self._capsys.readouterr().out

    def json(self, *arguments: str, metric: str = METRIC) -> Any:
        return json.loads(self(*arguments, "--json", metric=metric))["result"]

    def error(self, *arguments: str, metric: str = METRIC) -> str:
        with pytest.raises(SystemExit) as caught:
            self(*arguments, metric=metric)
        assert caught.value.code == 2
        lines = self._capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["boltcutter"])
    return Shell(tmp_path, capsys)


def test_the_verdict_comes_first(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values)
    verdict, warning, empty, *table = shell("model=a", "model=b").splitlines()
    expected = "model=b is better than model=a: +0.82 points, 95% interval 0.55 to 1.09, p = 0.0011, 5 pairs"
    assert verdict == expected
    assert warning.startswith("warning: each seed has its own split")
    assert empty == ""
    assert table[1].split() == ["model=a", "5", "0.9016", "±", "0.0073", "0.893", "0.912"]
    assert table[-1].endswith("paired t-test")


def test_worse_and_smaller_is_better(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values, metric="test/loss")
    assert shell("model=a", "model=b", metric="test/loss").startswith(
        "model=b is worse than model=a: +0.0082 in test/loss"
    )
    assert shell("model=b", "model=a", metric="test/loss").startswith("model=a is better than model=b: -0.0082")
    assert shell("model=a", "model=b", "--mode", "max", metric="test/loss").startswith("model=b is better")


def test_an_open_question_says_which_runs_answer_it(shell: Shell) -> None:
    for name, values in (("a", A), ("b", NOISY)):
        write_group(shell.runs, name, values)
    verdict, *commands = shell("model=a", "model=b", "--effect", "0.01").splitlines()
    assert verdict.startswith("not decided whether model=b is better than model=a: +0.22 points, 95% interval -1.3 to")
    assert verdict.endswith("run 9 more seeds:")
    for name, command in zip("ab", commands[:2], strict=True):  # reproduce, as nobody has signed these records
        expected = f"  boltcutter search search=seeds search.seeds=9 seed=5 reproduce=runs/{name}/{name}-4"
        assert command == expected
    small = shell("model=a", "model=b", "--effect", "0.0001").splitlines()[0]
    assert small.endswith("not even 200 seeds would show a difference of 0.01 points")


def test_a_difference_that_is_too_small_to_matter_is_a_result(shell: Shell) -> None:
    for name, values in (("a", A), ("b", NOISY)):
        write_group(shell.runs, name, values)
    found = shell("model=a", "model=b", "--effect", "0.02")
    assert found.startswith("model=b and model=a differ by less than 2 points: +0.22 points, 95% interval -1.3 to")


def test_a_small_difference_is_not_rounded_to_a_larger_one(shell: Shell) -> None:
    for name, values in (("a", (0.5, 0.6, 0.7)), ("b", (0.7053, 0.4053, 0.7053))):
        write_group(shell.runs, name, values)
    assert "is better than model=a: +0.53 points, 95% interval -49 to 50" in shell("model=a", "model=b")


def test_large_values_have_no_exponent(shell: Shell) -> None:
    for name, values in (("a", (12_340.0, 12_740.0, 12_990.0)), ("b", (12_140.0, 12_040.0, 12_990.0))):
        write_group(shell.runs, name, values, metric="test/loss")
    assert "e+" not in shell("model=a", "model=b", metric="test/loss")


def test_one_run_of_each_decides_nothing(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values[:1])
    found = shell("model=a", "model=b")
    assert found.startswith(
        "not decided whether model=b is better than model=a: +1.00 points, 1 and 1 runs; run 4 more"
    )
    assert "warning: one run of a group says nothing about others" in found


def test_groups_that_are_no_pairs(shell: Shell) -> None:
    write_group(shell.runs, "a", A)
    write_group(shell.runs, "b", [value + 0.02 for value in B], seed=10)
    [found] = shell.json("model=a", "model=b")["comparisons"]
    expected = stats.ttest_ind([value + 0.02 for value in B], A, equal_var=False)
    assert found["pairs"] == 0
    assert found["decision"] == "better"
    assert found["estimate"]["p"] == pytest.approx(expected.pvalue)


def test_folds_have_the_corrected_interval(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        for fold, value in enumerate(values):
            settings = {"data": {"num_folds": 5, "fold": fold}, "model": {"name": name}}
            write_run(shell.runs / name / str(fold), value, metric="val/accuracy", settings=settings)
    [found] = shell.json("runs/a", "runs/b", metric="val/accuracy")["comparisons"]
    differences = np.subtract(B, A)
    error = differences.std(ddof=1) * np.sqrt(1 / 5 + 1 / 4)
    assert found["estimate"]["test"] == "t-test corrected for folds"
    assert found["estimate"]["error"] == pytest.approx(error)
    assert found["p_adjusted"] == pytest.approx(2 * stats.t.sf(differences.mean() / error, 4))


def test_several_comparisons_are_adjusted(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B), ("c", NOISY), ("d", [v + 0.02 for v in NOISY])):
        write_group(shell.runs, name, values)
    found = shell.json("model=a", "model=b", "model=c", "model=d")["comparisons"]
    p = [comparison["estimate"]["p"] for comparison in found]
    assert p[2] < ALPHA  # alone
    smallest, middle, _ = sorted(p)
    assert [comparison["p_adjusted"] for comparison in found] == pytest.approx([3 * smallest, p[1], 2 * middle])
    assert "(Holm, 3 comparisons)" in found[0]["verdict"]
    assert found[2]["decision"] == ("better" if 2 * middle <= ALPHA else "undecided")


def test_json_has_everything(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values, right=[True] * 15 + [name == "b"] * 5, data="the same")
    found = shell.json("model=a", "model=b")
    assert found["groups"][0]["runs"] == {f"runs/a/a-{seed}": value for seed, value in enumerate(A)}
    [comparison] = found["comparisons"]
    assert comparison["warnings"] == comparison["commands"] == []
    assert comparison["estimate"]["smallest_effect"] == pytest.approx(0.00365, abs=1e-5)
    assert comparison["samples"]["count"] == 20
    assert len(comparison["samples"]["changed"]) == 5
    shown = shell("model=a", "model=b")
    assert "right predictions of these 5 pairs of models on 20 samples: +25 points" in shown


def test_searches_are_compared_by_their_best_trials(shell: Shell) -> None:
    write_search(shell.runs / "small", [0.3, 0.2], settings={"optimizer": {"lr": 0.3}})
    write_search(shell.runs / "large", [0.3, 0.2, 0.1])
    found = shell("runs/small", "runs/large")
    assert "+10.0 points, 1 and 1 runs" in found
    assert "warning: runs/large is the best of 3 trials, runs/small of 2: unequal tuning" in found


@pytest.mark.parametrize(
    ("arguments", "metric", "message"),
    [
        (["model=a"], METRIC, "error: compare: model=a is the only group; give a second one"),
        (["model=a", "model=b", "--effect", "-1"], METRIC, "error: --effect=-1: not a positive number"),
        (["model=a", "model=b", "--effect", "big"], METRIC, "error: --effect=big: not a positive number"),
        (["model=a", "model=b", "--mode"], METRIC, "error: --mode: needs a value; write --mode=<mode>"),
        (["model=a", "model=b", "--mode=up"], METRIC, "error: --mode=up: neither min nor max"),
        (["model=a", "model=b", "--efect=1"], METRIC, "error: --efect=1: no such flag; did you mean --effect=1?"),
        (["model=a", "model=b", "runs=nowhere"], METRIC, "error: runs=nowhere: no such folder"),
        (["model=a", "model=b"], "test/score", "error: --metric=test/score: its name does not say which values"),
        (["model=a", "model=c"], METRIC, "error: model=c: no completed runs are left"),
        (["model=a", "model=a"], METRIC, "error: model=a: a-0, a-1, a-2 and 2 more are in both groups"),
    ],
)
def test_mistakes_are_one_line(shell: Shell, arguments: list[str], metric: str, message: str) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values, metric=metric)
    assert shell.error(*arguments, metric=metric).startswith(message)


def test_names_of_somebody_else_are_printed_escaped(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.runs, name, values)
    write_run(shell.runs / "b" / "x", None, reason="\x1b[2J", settings={"choices": {"model": "b\x1b[2J"}}, seed=9)
    assert "\x1b" not in shell("model=a", str(shell.runs / "b"))


def test_the_equality_of_two_runs_is_compared_as_before(shell: Shell) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "run=nothing", "with=nothing"])
    assert "record.json is missing" in shell._capsys.readouterr().err


def test_arguments_are_completed(shell: Shell) -> None:
    cli.main(["compare", "--complete", "model=", "--metric", METRIC])
    found = shell._capsys.readouterr()
    assert "model=mlp\t" in found.out
    assert found.err == ""


def test_runs_are_elsewhere(shell: Shell) -> None:
    for name, values in (("a", A), ("b", B)):
        write_group(shell.root / "others", name, values)
    assert shell("model=a", "model=b", "runs=others").startswith("model=b is better")
    assert shell.error("model=a", "runs=others").startswith("error: compare: model=a is the only group")


@pytest.fixture(scope="module")
def equal_trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 trainings of the digits that differ in nothing but the seed, on the same data."""
    import boltcutter

    root = tmp_path_factory.mktemp("runs")
    options = ["model=linear", "data.seed=0", "data.batch_size=128", "trainer.max_epochs=5", "trainer.accelerator=cpu"]
    options += ["logger=csv", "report=false", "optimizer.lr=0.05", f"runs={root}"]
    for seed in range(80):
        boltcutter.train(*options, f"seed={seed}", f"folder={root / str(seed)}")
    return root


def most(studies: int) -> int:
    """Most rejections of true hypotheses that a level of 5% admits, with a probability of 99.9%."""
    return int(stats.binom.ppf(0.999, studies, ALPHA))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("metric", [METRIC, "test/loss"])
def test_equal_trainings_do_not_differ(equal_trainings: Path, metric: str) -> None:
    def comparison(first: str, second: str) -> Comparison:
        return compare(*(read_group(text, find_runs(equal_trainings), metric) for text in (first, second)), metric)

    studies = [
        comparison(f"seed>={seed} and seed<{seed + 5}", f"seed>={seed + 40} and seed<{seed + 45}")
        for seed in range(0, 40, 5)
    ]
    assert sum(study.estimate.p <= ALPHA for study in studies if study.estimate) <= most(8)
    everything = comparison("seed<40", "seed>=40")
    assert everything.estimate is not None
    assert everything.estimate.p > 0.001
    assert everything.warnings == ["both groups have the same settings, so any difference is chance"]
    pairs = [comparison(f"seed={seed}", f"seed={seed + 40}").samples for seed in range(40)]
    rejected = sum(pair.p <= ALPHA for pair in pairs if pair)
    assert len(pairs) == 40
    # Two models of one method do have different losses, which is why a pair of models says nothing about methods.
    assert rejected <= most(40) if metric == METRIC else rejected > most(40)
