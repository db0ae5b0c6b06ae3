import shlex
from pathlib import Path
from typing import cast

import pytest
from repairs import FILES_NOT_REPAIRED
from test_mistakes import FILES, with_file

from boltcutter.cli.file_fix import locate
from boltcutter.cli.main import dispatch_command
from boltcutter.cli.mistake import Explanation, explain
from boltcutter.config.errors import ConfigError, Kind, Mistake
from boltcutter.extend import Command
from boltcutter.project import Project

CHECK = Command("boltcutter.planning.check:check_command", "")


def apply(mistake: Explanation) -> None:
    """Replace the lines of a file that are wrong."""
    assert mistake.file
    assert mistake.line
    lines, first = Path(mistake.file).read_text().splitlines(), mistake.line - 1
    last = first + len(mistake.replaces)
    assert tuple(lines[first:last]) == mistake.replaces
    lines[first:last] = [] if mistake.fix is None else mistake.fix.splitlines()
    Path(mistake.file).write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "contents", "overrides"), [file[:3] for file in FILES if file[1] not in FILES_NOT_REPAIRED]
)
def test_a_program_that_applies_fixes_repairs_files(
    name: str, contents: str, overrides: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, arguments = with_file(tmp_path, name, contents), shlex.split(overrides)
    for _ in range(5):
        try:
            dispatch_command(project, CHECK, None, arguments)
        except SystemExit as end:
            capsys.readouterr()
            found = cast(ConfigError, end.__context__).mistakes[0]
            mistake = locate(explain(found, arguments), project, arguments)
            assert mistake.fix or mistake.replaces
            if mistake.file:
                apply(mistake)
            else:
                kept = [argument for argument in arguments if argument not in mistake.replaces]
                arguments = [*kept, mistake.fix] if mistake.fix else kept
        else:
            assert capsys.readouterr().out.endswith("ok\n")
            return
    pytest.fail(f"not repaired: {arguments}")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with an experiment and an option of its own."""
    for name in ("experiment", "model"):
        (tmp_path / "configs" / name).mkdir(parents=True)
    return Project.at(tmp_path)


@pytest.mark.parametrize(
    ("contents", "line", "number", "fix", "replaced"),
    [
        ("trainer:\n  precision: bf17\n", "trainer.precision=bf17: expected x; did you mean bf16?", 2,
         "  precision: bf16", ["  precision: bf17"]),
        ("trainer:\n  a: 1\n  b:\n    c: 2\nseed: 0\n", "trainer.b: Trainer takes no such argument", 3,
         None, ["  b:", "    c: 2"]),
        ("trainer: {b: 1, seed: 2}", "trainer.b: Trainer takes no such argument", 1,
         "trainer: {seed: 2}", ["trainer: {b: 1, seed: 2}"]),
        ("callback:\n  bst: {monitor: x}\n", "callback.bst.monitor: no such key; did you mean callback.best.monitor?",
         2, "  bst: {}", ["  bst: {monitor: x}"]),
        ("data:\n  batch_size: 64\n", "data.batch_size=64 does not divide over 3 ranks; try 66", 2,
         "  batch_size: 66", ["  batch_size: 64"]),
        ("a: b: 1\n", "{root}/configs/experiment/mine.yaml:1: not valid YAML: x; correct that line", 1, None, []),
        ("a:1\nb: 1\n", "{root}/configs/experiment/mine.yaml:1: not valid YAML: x; correct that line", 1,
         "a: 1", ["a:1"]),
    ],
)  # fmt: skip
def test_lines_of_a_file_are_corrected(
    contents: str, line: str, number: int, fix: str | None, replaced: list[str], project: Project
) -> None:
    (project.root / "configs" / "experiment" / "mine.yaml").write_text(contents)
    kind: Kind = "invalid_file" if "not valid YAML" in line else "unknown_key" if "no such" in line else "wrong_type"
    mistake = locate(explain(Mistake(line.format(root=project.root), kind), []), project, [])
    assert mistake.file == f"{project.root}/configs/experiment/mine.yaml"
    assert (mistake.line, mistake.fix, [*mistake.replaces]) == (number, fix, replaced)


def test_arguments_and_files_of_others_are_not_corrected(project: Project, tmp_path: Path) -> None:
    mine = project.root / "configs" / "experiment" / "mine.yaml"
    mine.write_text("seed: a\nlr: 3\n")
    given = explain(Mistake("seed=a: expected int", "wrong_type"), ["seed=a"])
    assert locate(given, project, ["seed=a"]) == given
    other = tmp_path.with_name("other.yaml")
    other.write_text("a: [1")
    line = Mistake(f"{other}:1: not valid YAML: x; correct that line", "invalid_file")
    assert locate(explain(line, []), project, []).file is None
    (mine.parent / "another.yaml").write_text("lr: 3\n")
    unknown = Mistake("lr: no such key", "unknown_key")
    assert locate(explain(unknown, []), project, []).file is None  # either may be meant
    assert locate(explain(unknown, []), project, ["experiment=mine"]).file == str(mine)
