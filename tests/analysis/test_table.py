"""Tables of runs."""

import csv
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_runs import write_group, write_search

from boltcutter.analysis.command import runs_command
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.table import (
    as_csv,
    columns,
    differing_settings,
    format_age,
    print_table,
    short_ids,
    shown_metrics,
    sort,
)
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

from .conftest import CONFIG, Write


def settings(**more: Any) -> dict[str, Any]:
    return {"settings": more}


def test_settings_that_differ_are_shown_by_what_was_chosen(tmp_path: Path, write: Write) -> None:
    convnet = {"data": "digits", "model": "convnet"}
    write(tmp_path / "a", **settings(choices=convnet, name="a", checkpoints="x"))
    write(tmp_path / "b", **settings(choices=convnet, seed=1, optimizer={"lr": 0.2}))
    assert differing_settings(find_runs(tmp_path)) == ["optimizer.lr", "seed"]  # not data.seed, which refers to seed
    write(tmp_path / "c", **settings(choices=convnet | {"model": "mlp"}, model={"hidden": 3, "dropout": 0.1}))
    assert differing_settings(find_runs(tmp_path)) == ["model", "optimizer.lr", "seed", "model.dropout"]
    write(tmp_path / "d", **settings(data={**CONFIG["data"], "seed": 5}, task={"amp": 1}))
    assert {"data.seed", "task.amp"} <= {*differing_settings(find_runs(tmp_path))}
    assert differing_settings(find_runs(tmp_path)[:1]) == []
    assert differing_settings([]) == []


def test_true_and_one_differ(tmp_path: Path, write: Write) -> None:
    for number, value in enumerate((1, True, 1.0)):
        write(tmp_path / str(number), **settings(optimizer={"fused": value}))
    assert differing_settings(find_runs(tmp_path)) == ["optimizer.fused"]


def test_columns_are_what_there_is(tmp_path: Path, write: Write) -> None:
    metrics = {"val/accuracy": 0.9, "val/loss": 1, "train/loss": 2}
    write(tmp_path / "a", metrics=metrics, test={"test/loss": 2, "test/accuracy": 1})
    runs = find_runs(tmp_path)
    assert shown_metrics(runs) == ["val/accuracy", "test/accuracy", "test/loss"]
    assert columns(runs) == (["id", "name", "age", "status", *shown_metrics(runs), "devices", "time"], [])
    assert columns(runs, "id, val/loss,optimizer.lr,model") == (["id", "val/loss", "optimizer.lr", "model"], [])
    with pytest.raises(ConfigError, match=r"--columns=val/los: .*; did you mean val/loss\?"):
        columns(runs, "id,val/los")


def test_settings_beyond_the_first_are_named(tmp_path: Path, write: Write) -> None:
    for number in range(2):
        write(tmp_path / str(number), **settings(extra={f"k{n}": number for n in range(9)}))
    assert columns(find_runs(tmp_path))[1] == ["extra.k6", "extra.k7", "extra.k8"]


def test_runs_are_sorted_with_the_best_first(tmp_path: Path, write: Write) -> None:
    for number, value in enumerate((0.2, None, 0.9, float("nan"), 0.5)):
        write(tmp_path / str(number), day=number + 1, metrics={"val/accuracy": value, "val/loss": value}, seed=number)
    runs = find_runs(tmp_path)

    def ids(key: str) -> str:
        return "".join(run.id for run in sort(runs, key))

    assert [ids(key) for key in ("val/accuracy", "-val/accuracy", "val/loss", "-val/loss")] == [
        *("24013", "04213", "04213", "24013")
    ]
    assert (ids("age"), ids("-age"), ids("id")) == ("43210", "01234", "01234")
    with pytest.raises(ConfigError, match=r"--sort=val/acc: .*did you mean"):
        sort(runs, "val/acc")


def test_ids_are_short_where_that_is_unique(tmp_path: Path, write: Write) -> None:
    names = ("20260101-120000-aaaaaaaa", "20260102-120000-aaaaaaaa", "20260101-120000-bbbbbbbb", "own")
    for name in names:
        write(tmp_path / name)
    assert [short_ids(find_runs(tmp_path))[name] for name in names] == [names[0], names[1], "bbbbbbbb", "own"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (7200, "2h"), (90000, "1d"), (1e6, "1w"), (-5, "0s")]
)
def test_ages_are_written_as_filters_take_them(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_text_of_others_cannot_control_the_terminal(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", name="x\x1b]0;title\x07[red]y\nz", tags=["[bold]t"])
    print_table(find_runs(tmp_path), ["id", "name", "tag", "val/x"])
    assert capsys.readouterr().out.split() == [
        "id",
        "name",
        "tag",
        "val/x",
        "a",
        r"x\x1b]0;title\x07[red]y",
        "z",
        "[bold]t",
    ]


def test_a_narrow_terminal_shows_whole_columns(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        write(tmp_path / f"20260101-120000-abcdef0{number}", metrics={"val/accuracy": 0.5}, seed=number,
              settings={"optimizer": {"lr": 1 / 3 + number, "weight_decay": 0.1 * number}})  # fmt: skip
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    runs = find_runs(tmp_path)
    hidden = print_table(runs, columns(runs)[0])
    header, first, _ = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert header.split() == ["id", "name", "age", "status", "optimizer.lr", "val/accuracy", "devices"]
    assert first.split()[-5:] == ["0.33333", "0.5000", "2", "×", "CPU"]
    assert "…" not in header + first
    assert len(header) <= 80
    assert hidden == ["optimizer.weight_decay", "time"]
    monkeypatch.setenv("COLUMNS", "20")
    assert print_table(runs, ["name", "id"]) == ["id"]


def test_without_rich_the_table_has_the_same_cells(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", metrics={"val/loss": 1 / 3}, note="one\ntwo")
    runs, keys = find_runs(tmp_path), ["id", "val/loss", "note"]
    assert print_table(runs, keys) == []
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert print_table(runs, keys) == []
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        line.split() for line in with_rich.splitlines()
    ]


def test_csv_has_all_digits(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", metrics={"val/loss": 1 / 3, "bad": float("nan"), "huge": float("inf")}, tags=["x", "y,z"])
    runs = find_runs(tmp_path)
    rows = [*csv.reader(io.StringIO(as_csv(runs, ["id", "val/loss", "tag", "seed", "note", "time", "data.shape"])))]
    assert rows[1] == ["a", repr(1 / 3), "[x,'y,z']", "0", "", "90.0", "[1,8,8]"]
    write(tmp_path / "a")
    assert as_csv(find_runs(tmp_path), ["id", "tag"]) == "id,tag\na,\n"


def test_text_of_others_is_no_formula_in_csv(tmp_path: Path, write: Write) -> None:
    texts = ['=HYPERLINK("http://evil.example","x")', "+1+cmd|' /C calc'!A0", "-2", "@SUM(A1)", "\tx", "plain=1"]
    for number, text in enumerate(texts):
        write(tmp_path / str(number), day=number + 1, name=text, settings={"=a": -1, "lr": -0.5})
    header, *rows = csv.reader(io.StringIO(as_csv(find_runs(tmp_path), ["name", "=a", "lr"])))
    assert header == ["name", "'=a", "lr"]
    assert rows == [[f"'{text}" if text != "plain=1" else text, "-1", "-0.5"] for text in texts]


def test_a_search_over_seeds_has_the_mean_of_its_trials(tmp_path: Path) -> None:
    write_search(tmp_path / "s", [0.1, 0.3], seeds=2)
    (search,) = (run for run in find_runs(tmp_path) if run.kind == "search")
    assert search.metrics["val/loss"] == pytest.approx(0.2)
    assert search.metrics["test/accuracy"] == pytest.approx(0.8)


def test_columns_of_runs_that_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_group(tmp_path, "a", [0.9])
    write_group(tmp_path, "b", [0.4], seed=1, metric="val/accuracy")
    runs_command(Project.at(tmp_path), [f"runs={tmp_path}", "--limit=1", "--columns=id,test/accuracy"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["b-1"]
    runs_command(Project.at(tmp_path), [f"runs={tmp_path}", "seed=7"])
    assert capsys.readouterr().out == f"no runs in {tmp_path} match seed=7\n"
