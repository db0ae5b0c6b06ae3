import shlex

import pytest
from repairs import LEFT_OUT, REPAIRED

from boltcutter.cli.main import main
from boltcutter.extend import Command
from boltcutter.project import Project
from boltcutter_machine.mistake import explain

CHECK = Command("boltcutter_planning.check:main", "")


@pytest.mark.parametrize(
    ("line", "arguments", "code", "fix", "replaced"),
    [
        ("trainer.devces: Trainer takes no such argument; did you mean devices?", "+trainer.devces=2", "unknown_key",
         "+trainer.devices=2", 1),
        ("trainer.devces: Trainer takes no such argument; did you mean devices?", "", "unknown_key", None, 0),
        ("data.batch_size=64 does not divide over 3 ranks; try 66", "trainer.devices=3", "invalid_value",
         "data.batch_size=66", 0),
        ("model.hidden_sizes=[] has no hidden layer; try model=linear", "model=mlp model.hidden_sizes=[]",
         "invalid_value", "model=linear", 2),
        ("data.split=[0.5, 0.5, 0.5] add up to 1.5; try [0.8, 0.1, 0.1]", "data.split=[0.5,0.5,0.5]", "invalid_value",
         "data.split=[0.8, 0.1, 0.1]", 1),
        ("lr: no such key; try a value below 1", "lr=3", "unknown_key", None, 1),
        ("optimizer.lr=fast: expected float", "model=mlp optimizer.lr=fast", "wrong_type", None, 1),
        ("resume=/x: no run there; give the folder of a run", "resume=/x", "unknown_run", None, 0),
        ("init_from=/x: no such file; give a file", "init_from=/x", "invalid_value", None, 0),
        ("model=nmp: no such option (there are: x)", "model=nmp", "unknown_option", None, 0),
        ("launch.region=x: no such region; try launch.region=<region>", "", "invalid_value", None, 0),
        ("filter=a=1 and stauts=failed: position 9: stauts: no metric, setting or field; did you mean status?",
         "a=1␣and␣stauts=failed", "unknown_key", "a=1␣and␣status=failed", 1),
        ("--sort=val/los: no metric, setting or field of these runs; did you mean val/loss?", "--sort val/los --csv",
         "unknown_key", "--sort=val/loss", 2),
        ("run=best:val/los: no run has val/los; did you mean best:val/loss?", "run=best:val/los", "unknown_run",
         "run=best:val/loss", 1),
        ("run=2026: 3 runs begin like this (a, b); give more of the id", "run=2026", "unknown_run", None, 0),
        ("input is not set; set input=<file or folder>, several separated by commas", "", "missing_value", None, 0),
        ("x: mcp takes no such argument; remove it", "x", "unknown_key", None, 1),
        ("configs/model/mlp.yaml:2: not valid YAML: x; correct that line", "model=mlp", "invalid_file", None, 0),
    ],
)  # fmt: skip
def test_an_error_is_data(line: str, arguments: str, code: str, fix: str | None, replaced: int) -> None:
    found = explain(line, [word.replace("␣", " ") for word in arguments.split()])
    assert (found.code, found.fix and found.fix.replace(" and ", "␣and␣"), len(found.replaces)) == (code, fix, replaced)
    assert found.message == line
    assert line.endswith(f"; {found.remedy}" if found.remedy else "")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [key for key in (*REPAIRED, *LEFT_OUT) if not key.startswith("--")])
def test_a_program_that_applies_fixes_repairs(overrides: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(overrides)
    for _ in range(5):
        try:
            main(Project.find(__file__), CHECK, None, arguments)
        except SystemExit:
            found = explain(capsys.readouterr().err.splitlines()[0].removeprefix("error: "), arguments)
            assert found.fix or found.replaces
            kept = [argument for argument in arguments if argument not in found.replaces]
            arguments = [*kept, found.fix] if found.fix else kept
        else:
            assert capsys.readouterr().out.endswith("ok\n")
            return
    pytest.fail(f"not repaired: {arguments}")
