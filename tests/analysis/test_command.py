"""The command ``boltcutter runs``."""

import csv
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.analysis import live
from boltcutter.cli import commands

from .conftest import Write

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def runs(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on a folder with three runs; returns output and errors."""
    root = tmp_path / "runs"
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        settings = {"seed": number, "choices": {"data": "digits", "model": ["convnet", "mlp"][number % 2]}}
        write(
            root / "digits" / f"20260101-120000-0000000{number}",
            day=number + 1,
            metrics={"val/accuracy": accuracy},
            settings=settings,
        )

    def call(*arguments: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        try:
            commands.main(["runs", f"runs={root}", *arguments])
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        assert code == status
        found = capsys.readouterr()
        return found.out, found.err

    return call


def test_a_table_shows_what_differs(runs: Run) -> None:
    out, _ = runs()
    header, *rows = out.splitlines()
    assert header.split() == ["id", "name", "age", "status", "model", "seed", "val/accuracy", "devices", "time"]
    assert [row.split()[0] for row in rows] == ["00000000", "00000001", "00000002"]
    assert rows[1].split()[3:] == ["completed", "mlp", "1", "0.9000", "2", "×", "CPU", "1:30"]


def test_filters_sorting_columns_and_formats(runs: Run) -> None:
    out, _ = runs("model=convnet and val/accuracy>0.1", "--sort", "val/accuracy", "--columns=id,val/accuracy")
    assert [line.split() for line in out.splitlines()[1:]] == [["00000002", "0.7000"], ["00000000", "0.5000"]]
    assert [run["seed"] for run in map(dict, csv.DictReader(io.StringIO(runs("--csv", "seed<2")[0])))] == ["0", "1"]
    assert [run["settings"]["seed"] for run in json.loads(runs("--json", "--sort=-seed")[0])["result"]] == [2, 1, 0]
    out, _ = runs("--limit", "1")
    assert out.splitlines()[1].startswith("00000002")  # the newest
    assert out.splitlines()[-1] == "1 of 3 runs; --limit 0 shows all"
    assert len(runs("--limit", "0")[0].splitlines()) == 4
    assert runs("seed=7")[0].startswith("no runs in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "sed=1",
            "error: filter=sed=1: position 1: sed: no metric, setting or field of these runs; did you mean seed?",
        ),
        ("seed=1 model=mlp", "error: model=mlp: one filter is expected; quote it: boltcutter runs 'seed=1 model=mlp'"),
        ("remvoe seed=1", "error: remvoe: no such command; did you mean remove? (there are: tag, "),
        ("--live prot=0", "error: prot: no such argument; did you mean port?"),
        ("--colums=id", "error: --colums=id: no such flag; did you mean --columns=id?"),
        ("--limt 3", "error: --limt=3: no such flag; did you mean --limit=3?"),
        ("--yess=1", "error: --yess=1: no such flag; did you mean --yes?"),
        ("restore latest", "error: restore: there are no archived runs; "),
        ("--sort", "error: --sort: needs a value"),
        ("--limit few", "error: --limit=few: not a number"),
        ("--json=1", "error: --json=1: no such flag"),
        ("--jsn", "error: --jsn: no such flag; did you mean --json?"),  # not --yes
        ("latst", "error: run=latst: no run with this id; did you mean latest?"),
        (
            "status=complete",
            "error: filter=status=complete: position 8: complete is no status; did you mean completed?",
        ),
        ("remove kind!=runs", "error: filter=kind!=runs: position 7: runs is no kind; did you mean run?"),
        ("runs=nowhere", "error: runs=nowhere: no such folder; set it to a folder of runs"),
        ("tag 00000001", "error: tag: text missing, or too many arguments; use boltcutter runs tag"),
        ("note 00000001 a b", "error: note: text missing, or too many arguments"),
        ("remove", "error: remove: run missing, or too many arguments; use boltcutter runs remove <run or filter> …"),
        ("remove 00000001", "error: remove: asks first, but the input is no terminal; add --yes"),
        ("remove nothing", "error: run=nothing: no run with this id"),
        ("remove 2026", "error: run=2026: 3 runs begin like this"),
    ],
)
def test_mistakes_are_one_line(runs: Run, arguments: str, message: str) -> None:
    out, err = runs(*shlex.split(arguments), status=2)
    assert err.startswith(message)
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("prot=0", True),
        ("cost<3", False),
        ("data.port=3", False),
        ("report=false", False),
        ("prot=3 and seed=1", False),
    ],
)
def test_a_filter_near_an_argument_is_refused_only_where_it_can_be_meant(
    runs: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_refused: bool, is_first: bool
) -> None:
    served = list[str]()
    monkeypatch.setattr(live, "serve", lambda place, query, settings: served.extend(key for key, _ in query.keys))
    if is_first:
        shutil.rmtree(tmp_path / "runs" / "digits")
    _, err = runs("--live", text, status=2 if is_refused else 0)
    if is_refused:
        assert err == "error: prot: no such argument; did you mean port?\n"
    else:
        assert served == re.findall(r"[a-z.]+(?=[=<])", text)
        unknown = [] if is_first else [key for key in served if key != "seed"]
        assert re.findall("^warning: (.+?): no metric, setting or field of these runs", err, re.M) == unknown


def test_what_cannot_be_written_is_one_line(runs: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = runs(f"--html={tmp_path / 'nowhere' / 'page.html'}", status=2)
    assert error.startswith(f"error: --html={tmp_path / 'nowhere' / 'page.html'}: cannot be written (No such file")
    assert error.endswith("; choose another file\n")
    place = tmp_path / "runs" / "digits" / "20260101-120000-00000000"
    (place / "labels.json").mkdir()
    _, error = runs("note", "20260101-120000-00000000", "text", status=2)
    assert error.startswith(f"error: note: {place}/")
    assert error.count("\n") == 1
    monkeypatch.setattr(
        Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left", str(self)))
    )
    _, error = runs("remove", "20260101-120000-00000001", "--yes", status=2)
    assert error.endswith("cannot be written (No space left); check its permissions and the free space\n")
    assert (tmp_path / "runs" / "digits" / "20260101-120000-00000001" / "record.json").is_file()


def test_a_filter_may_select_a_search_and_its_trials(runs: Run, write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "digits" / "20260109-120000-0000000a"
    write(folder / "trials" / "0000", day=9)
    (folder / "search.json").write_text("{}")
    out, _ = runs("archive", "id!=x")
    assert len(out.splitlines()) == 4  # the search, and not its trial by itself
    runs("restore", "id!=x")
    _, err = runs("archive", "kind=trial", status=2)
    assert "part of the search 20260109-120000-0000000a; archive the search" in err
    assert "0000000a/0000  tag" in runs("tag", "id!=x", "all")[0]
    assert len(runs("remove", "id!=x", "--yes")[0].splitlines()) == 4
    assert not folder.exists()


def test_labels_removal_and_archives(runs: Run) -> None:
    runs("tag", "seed>=1", "baseline")
    assert runs("note", "00000001", "the best")[0].split() == ["20260101-120000-00000001", "note", "the", "best"]
    assert "the best" in runs("best:val/accuracy")[0]  # a name is listed like a filter
    assert [run["tags"] for run in json.loads(runs("--json")[0])["result"]] == [[], ["baseline"], ["baseline"]]
    assert [run["note"] for run in json.loads(runs("--json", "tag=baseline")[0])["result"]] == ["the best", ""]
    runs("untag", "latest", "baseline")
    assert len(json.loads(runs("--json", "tag=baseline")[0])["result"]) == 1
    out, _ = runs("archive", "latest", "seed=0")
    undo = re.findall(r"undo by: boltcutter runs (restore 20260101-120000-0000000.) (runs=.*)", out)
    assert len(undo) == 2
    assert runs(*undo[0][0].split())[0].strip().endswith(f"boltcutter runs archive {undo[0][0][8:]} {undo[0][1]}")
    runs("archive", undo[0][0][8:])
    assert len(json.loads(runs("--json")[0])["result"]) == 1
    assert len(json.loads(runs("--json", "--archived")[0])["result"]) == 2
    runs("restore", "seed=0", "seed<5")  # both, once
    assert len(json.loads(runs("--json")[0])["result"]) == 3
    out, _ = runs("remove", "status=completed and seed!=1", "--yes")
    assert [line.partition(" ")[0] for line in out.splitlines()] == ["removed", "removed"]
    assert [run["settings"]["seed"] for run in json.loads(runs("--json")[0])["result"]] == [1]
    assert runs("remove", "seed=9", "--yes") == ("no runs are selected\n", "")


def test_a_run_that_cannot_be_read_is_listed(runs: Run, tmp_path: Path) -> None:
    (tmp_path / "runs/digits/20260101-120000-00000001/record.json").write_text("[")
    out, err = runs()
    assert "unreadable" in out
    assert err.startswith("warning: ")
    assert err.count("\n") == 1


def test_completion(runs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boltcutter.analysis.command.candidates", lambda project: {"latest": "", "20260101": "digits"})
    assert runs("--complete", "--so")[0] == "--sort\t\n"
    assert runs("--complete", "ta")[0] == "tag\t\n"
    assert runs("--complete", "2", "tag")[0] == "20260101\tdigits\n"
    assert runs("--complete", "l")[0] == "latest\t\n"
    assert runs("--complete", "sta")[0] == "status=\t\n"


def test_names_of_somebody_else_cannot_control_the_terminal(
    runs: Run, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of folders, settings, metrics and tags, in each output that is read in a terminal."""
    name, settings = "\x1b]0;title\x07\x9b31m", {"choices": {"data": "digits", "model": "\x1b[2J"}, "\x1b[1A": 1}
    evil = write(tmp_path / "runs" / name / f"a{name}", name=name, settings=settings, metrics={name: 1.0}, tags=[name])
    for folder in (evil.parent / f"b{name}", evil.parent / f"c{name}"):
        folder.mkdir()
        (folder / "record.json").write_text("{")
    outputs = [runs(*flags) for flags in ((), ("--csv",), ("--json",), ("--columns", "id,\x1b[1A"))]
    outputs += [runs(verb, "status=completed", *more) for verb, *more in (["tag", "x"], ["archive"])]
    outputs += [
        runs("restore", "status=completed"),
        runs("remove", f"b{name}", "--yes"),
    ]
    monkeypatch.setattr("boltcutter.analysis.references.runs_folder", lambda *_: str(tmp_path / "runs"))
    outputs.append(runs("--complete", "", "remove"))
    shown = "".join(text for output in outputs for text in output)
    assert r"\x1b[1A" in shown
    assert not [line for line in shown.splitlines() if not line.replace("\t", "").isprintable()]


@pytest.mark.timeout(60)
def test_references_that_multiply_are_not_resolved(runs: Run, tmp_path: Path, write: Write) -> None:
    settings = {f"x{n}": f"${{x{n - 1}}}" * 300 for n in range(1, 12)} | {"x0": "a" * 100}
    write(tmp_path / "runs" / "evil" / "one", settings=settings)
    assert "one" in runs()[0]
