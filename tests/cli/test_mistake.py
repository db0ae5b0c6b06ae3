import shlex

import pytest
from repairs import LEFT_OUT, REPAIRED

from boltcutter.cli.mistake import explain
from boltcutter.config.errors import ConfigError, Kind, Mistake
from boltcutter.planning.check import check_command
from boltcutter.project import Project

PROJECT = Project.find(__file__)


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
        ("filter=sed=0: position 1: sed: no metric, setting or field of these runs; did you mean seed?", "sed=0 seed=1",
         "unknown_key", "seed=0", 1),
        ("filter=a=1 and status=complet: position 16: complet is no status; did you mean completed? (there are: x)",
         "a=1␣and␣status=complet", "invalid_value", "a=1␣and␣status=completed", 1),
        ("--htm=x.html: no such flag; did you mean --html=x.html? (there are: --html)", "a --htm=x.html",
         "unknown_flag", "--html=x.html", 1),
        ("--limt=3: no such flag; did you mean --limit=3? (there are: --limit)", "runs --limt 3 --csv", "unknown_flag",
         "--limit=3", 2),
        ("--batch=3: no such flag; did you mean --batch? (there are: --batch)", "--batch=3", "unknown_flag",
         "--batch", 1),
        ("launch.array=seed: invalid syntax; give it as launch.array='seed=1,2'", "launch.array=seed", "invalid_value",
         None, 0),
        ("add modle: no such kind; did you mean model? (there are: model)", "modle tiny", "unknown_option", None, 0),
        ("vendor callback.foo: no such package or component; did you mean callback.guard?", "callback.foo",
         "unknown_option", "callback.guard", 1),
        ("add model mlp: configs/model/mlp.yaml exists already; choose another name", "model mlp", "invalid_value",
         None, 0),
        ("search.space.optimizer.lrr=choice(1): optimizer.lrr: AdamW takes no such argument; did you mean lr?",
         "search.space.optimizer.lrr=choice(1)", "unknown_key", "search.space.optimizer.lr=choice(1)", 1),
        ("search.space.lr=choice(1): lr: no such key; did you mean optimizer.lr?", "search.space.lr=choice(1)",
         "unknown_key", "search.space.optimizer.lr=choice(1)", 1),
        ("run=best:val/los: no run has val/los; did you mean best:val/loss?", "run=best:val/los", "unknown_run",
         "run=best:val/loss", 1),
        ("run=latst: no run with this id; did you mean latest?", "latst", "unknown_run", "latest", 1),
        ("run=latst: no run with this id; did you mean latest?", "latst baseline", "unknown_run", None, 0),
        ("run=latst: no run with this id; did you mean latest?", "run=latst", "unknown_run", "run=latest", 1),
        ("run=2026: 3 runs begin like this (a, b); give more of the id", "run=2026", "unknown_run", None, 0),
        ("input is not set; set input=<file or folder>, several separated by commas", "", "missing_value", None, 0),
        ("x: mcp takes no such argument; remove it", "x", "unknown_key", None, 1),
        ("configs/model/mlp.yaml:2: not valid YAML: x; correct that line", "model=mlp", "invalid_file", None, 0),
    ],
)  # fmt: skip
def test_an_error_is_data(line: str, arguments: str, code: Kind, fix: str | None, replaced: int) -> None:
    found = explain(Mistake(line, code), [word.replace("␣", " ") for word in arguments.split()])
    assert (found.code, found.fix and found.fix.replace(" and ", "␣and␣"), len(found.replaces)) == (code, fix, replaced)
    assert found.message == line
    assert line.endswith(found.remedy or "") or line.endswith(f"({found.remedy})")
    assert found.remedy or ";" not in line


def test_values_and_remedies_are_whole() -> None:
    text = "a=1 and status="
    line = f"filter={text}: position 15: nothing where a value was expected; write status=<value>"
    found = explain(Mistake(line), [text])
    assert (found.value, found.fix, found.replaces) == (text, None, ())
    assert explain(Mistake("add modle: no such kind (there are: x)"), ["modle", "tiny"]).value == "modle"
    assert (
        explain(Mistake("--foo: no such flag (there are: --help, --json)"), ["--foo"]).remedy
        == "there are: --help, --json"
    )
    groups = "project: small; built-in: mlp, gpt"
    assert explain(Mistake(f"model=nope: no such option ({groups})"), ["model=nope"]).remedy == groups
    assert explain(Mistake("seed=a: expected int | null"), ["seed=a"]).remedy == "expected int | null"
    assert explain(Mistake("max_time=5minutes: expected D:H; correct it"), ["max_time=5minutes"]).remedy == "correct it"
    listed = "checkpoints of the run: best.ckpt"
    assert explain(Mistake(f"ckpt=step-9: no such file ({listed})"), ["ckpt=step-9"]).remedy == listed


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ("model=mlp model.activation='not installed'", "wrong_type"),
        ("model=mlp model.activation='refers to nothing'", "wrong_type"),
        ("optimizer.lr='no such key'", "wrong_type"),
        ("model.hidden_size=1", "unknown_key"),
        ("model='is not set'", "unknown_option"),
        ("=3", "invalid_override"),
        ("data.batch_size=[1", "invalid_override"),
        ("model._target_=boltcutter.model.mlp.MPL", "unknown_class"),
        ("model._target_=package_that_nobody_has.Net", "not_installed"),
        ("optimizer.lr=???", "missing_value"),
        ("optimizer.lr='${expected}'", "unresolved_reference"),
        ("+data.api_key=expected", "secret"),
        ("resume=x reproduce='no such flag'", "conflict"),
        ("experiment='given twice.yaml'", "unknown_option"),
    ],
)
def test_what_the_user_wrote_never_decides_the_kind(overrides: str, kind: Kind) -> None:
    with pytest.raises(ConfigError) as error:
        check_command(PROJECT, shlex.split(overrides))
    assert [mistake.kind for mistake in error.value.mistakes] == [kind], error.value.mistakes


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [key for key in (*REPAIRED, *LEFT_OUT) if not key.startswith("--")])
def test_a_program_that_applies_fixes_repairs(overrides: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(overrides)
    for _ in range(5):
        try:
            check_command(PROJECT, arguments)
        except ConfigError as error:
            found = explain(error.mistakes[0], arguments)
            assert found.fix or found.replaces
            kept = [argument for argument in arguments if argument not in found.replaces]
            arguments = [*kept, found.fix] if found.fix else kept
        else:
            assert capsys.readouterr().out.endswith("ok\n")
            return
    pytest.fail(f"not repaired: {arguments}")


@pytest.mark.parametrize("text", ["x; did you mean y?", "try y", "a: b; remove it", "it cannot be combined; use y"])
@pytest.mark.parametrize("given", [True, False], ids=["argument", "file"])
def test_what_the_user_wrote_is_no_remedy(text: str, given: bool) -> None:
    """Neither in a line whose parts are known, nor in another one that quotes an argument."""
    arguments = [f"name={text}"] if given else []
    known = Mistake.of("name", "has no such meaning", "write a name", value=text)
    for line in (known, *([Mistake(str(known), known.kind)] if given else [])):
        found = explain(line, arguments)
        assert (found.setting, found.value, found.remedy, found.fix) == ("name", text, "write a name", None)
        assert found.replaces == ()
        assert found.message == f"name={text}: has no such meaning; write a name"
