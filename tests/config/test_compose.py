import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from boltcutter.config.compose import compose, merge, refuse_duplicates
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.project import Project, summary
from boltcutter.scaffold.source_code import REGISTER

PROJECT = Project.find(__file__)
FILES = {
    "train": "defaults:\n  m: a\n  o: null\n  experiment: null\nx: 1\ny: ${x}\nuses: ${m}\nalso: [{inner: '${o}'}]\n"
    "name: ${choices.m}\n",
    "m/a": "# The first.\nk: 1\nl: [1, 2]\nshape: ${x}",
    "m/b": "# The second.\ndefaults: a\nk: 2",
    "m/c": "z: 3",
    "m/both": "defaults: [a, c]\nboth: true",
    "o/sgd": "_target_: SGD\n_partial_: true\nlr: 1\nmomentum: 2",
    "o/adam": "_target_: Adam\n_partial_: true\nlr: 3",
    "o/layers": "_target_: Sequential\n_args_: [1, 2]",
    "o/warm": "defaults: sgd\nlr: 4",
    "experiment/e": "defaults:\n  m: b\nx: 9\nm:\n  l: [7]",
    "experiment/child": "defaults:\n  experiment: e\n  o: sgd\nx: 10",
    "experiment/other": "x: 11\nm:\n  k: 12",
    "experiment/target": "defaults:\n  o: sgd\no:\n  _target_: Adam\n  eps: 5",
}


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


MULTIPLYING = "".join(f"k{level}: ${{m.k{level + 1}}}${{m.k{level + 1}}}\n" for level in range(70)) + "k70: a\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    return Project(tmp_path, None, (tmp_path,))


def get(cfg: Settings, path: str) -> Any:
    first, *rest = path.split(".")
    found = cfg.get(first)
    for key in rest:
        found = found[int(key) if isinstance(found, list) else key]
    return found


A = {"k": 1, "l": [1, 2], "shape": 1}
SGD = {"_target_": "SGD", "_partial_": True, "lr": 1, "momentum": 2}


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        pytest.param("", "m", A, id="the default option"),
        pytest.param("m=c", "m", {"z": 3}, id="another option"),
        pytest.param("m=b", "m", A | {"k": 2}, id="an option that inherits"),
        pytest.param("m=[a,c]", "m", A | {"z": 3}, id="two options, laid over each other"),
        pytest.param("m=[c,b]", "m", A | {"z": 3, "k": 2}, id="two, of which one inherits"),
        pytest.param("m=both", "m", A | {"z": 3, "both": True}, id="an option that inherits from two"),
        pytest.param("m=[a,null]", "m", A, id="an option and nothing"),
        pytest.param("m=null", "m", None, id="no option"),
        pytest.param("~m", "m", None, id="no option, with a tilde"),
        pytest.param("m=null", "choices.m", "none", id="the choice of none"),
        pytest.param("+m=c", "m", {"z": 3}, id="a plus before a group"),
        pytest.param("m=[a,c]", "name", "a+c", id="the choice of two"),
        pytest.param("o=warm", "o", SGD | {"lr": 4}, id="a call that inherits"),
        pytest.param("o=[sgd,adam]", "o", {"_target_": "Adam", "_partial_": True, "lr": 3}, id="another call replaces"),
        pytest.param("experiment=e", "m", A | {"k": 2, "l": [7], "shape": 9}, id="an experiment picks and sets"),
        pytest.param("experiment=e", "y", 9, id="an experiment sets what others refer to"),
        pytest.param("experiment=e m=c", "m", {"z": 3, "l": [7]}, id="a override picks over an experiment"),
        pytest.param("x=4 experiment=e", "y", 4, id="a override sets over an experiment"),
        pytest.param("experiment=child", "x", 10, id="an experiment that inherits"),
        pytest.param("experiment=child", "m.l", [7], id="an inherited value"),
        pytest.param("experiment=child", "choices.m", "b", id="an inherited pick"),
        pytest.param("experiment=child", "o.lr", 1, id="a pick beside an inherited one"),
        pytest.param("experiment=[e,other]", "m", {"k": 12, "l": [7], "shape": 11}, id="two experiments"),
        pytest.param(
            "experiment=target", "o", {"_target_": "Adam", "_partial_": True, "eps": 5}, id="an experiment's own call"
        ),
        pytest.param("o=sgd o._target_=Adam", "o", {"_target_": "Adam", "_partial_": True}, id="a override's own call"),
        pytest.param(
            "o=sgd o.lr=6 o._target_=Adam", "o", {"_target_": "Adam", "_partial_": True, "lr": 6}, id="in any order"
        ),
        pytest.param("o=sgd +o._args_=[1] o._target_=Adam", "o._args_", [1], id="and its positional arguments"),
        pytest.param("o=layers o._target_=Adam", "o", {"_target_": "Adam"}, id="which do not pass on"),
        pytest.param("o=sgd o._target_=SGD", "o", SGD, id="the same call"),
        pytest.param("+m.new.deep=1", "m.new", {"deep": 1}, id="a new key"),
        pytest.param("++x=2", "x", 2, id="two pluses"),
        pytest.param("o=sgd o.nesterov=true", "o.nesterov", True, id="an argument of a call needs no plus"),
        pytest.param("~m.k", "m", {"l": [1, 2], "shape": 1}, id="without a key"),
        pytest.param("~m.l.0", "m.l", [2], id="without an element"),
        pytest.param("m.l=[5,6,7]", "m.l", [5, 6, 7], id="a list"),
        pytest.param("m.l.0=5", "m.l", [5, 2], id="an element"),
        pytest.param("m.l={a: {b: 1}}", "m.l.a", {"b": 1}, id="a map"),
        pytest.param("x=${m.k}", "x", 1, id="a reference to another file"),
        pytest.param("uses.k=8", "m.k", 8, id="a key through a reference"),
        pytest.param("uses=8", "uses", 8, id="in place of a reference"),
        pytest.param("x=a=b/epoch=3-step=10.ckpt", "x", "a=b/epoch=3-step=10.ckpt", id="equals signs"),
        pytest.param("+m.best={val/loss: min}", "m.best", {"val/loss": "min"}, id="a slash in a key"),
    ],
)
def test_compose(project: Project, overrides: str, path: str, value: Any) -> None:
    assert get(compose(project, split(overrides)), path) == value


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        pytest.param("", {"m", "o"}, id="both are referred to"),
        pytest.param("uses=1", {"o"}, id="nothing refers to one"),
        pytest.param("uses=${m.k}", {"m", "o"}, id="to a value in it"),
        pytest.param("uses=${oc.select:m.k,3}", {"m", "o"}, id="as an argument"),
        pytest.param("uses=${choices.m}", {"o"}, id="to another key of that name"),
        pytest.param("uses=1 also=1 +m=null", set(), id="null may be given for an unused group"),
        pytest.param("uses=1 also=${o.lr} o=chained", {"m", "o"}, id="through another group"),
        pytest.param("uses=1 also=1", set(), id="references between unused groups do not count"),
    ],
)
def test_an_unused_group_is_removed(project: Project, overrides: str, kept: set[str]) -> None:
    write(project.root, "o/chained", "lr: ${m.k}")
    cfg = compose(project, [*split(overrides), "name=x"])
    assert {"m", "o"} & set(cfg) == kept
    assert {"m", "o"} & set(cfg.choices) == kept


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("uses=1 m=b", "m=b"),
        ("uses=1 m.k=3", "m.k=3"),
        ("uses=1 ~m.k", "~m.k"),
        ("uses=1 experiment=e", "m=b"),
        ("uses=1 experiment=other", "experiment=other"),
    ],
)
def test_an_override_of_an_unused_group_is_refused(project: Project, overrides: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(project, [*split(overrides), "name=x"])
    assert str(error.value).startswith(f"{named}: ")


def test_another_task_need_not_use_what_the_experiment_selects(project: Project) -> None:
    write(project.root, "task/own", "k: 1")
    write(project.root, "experiment/e", "defaults:\n  m: b\n  o: sgd\no:\n  lr: 2\nx: 9")
    cfg = compose(project, ["experiment=e", "task=own", "uses=1", "also=1", "name=x"])
    assert ("m" in cfg, "o" in cfg, cfg.x) == (False, False, 9)
    with pytest.raises(ConfigError, match=r"^m=c: nothing refers to m"):
        compose(project, ["experiment=e", "task=own", "uses=1", "also=1", "name=x", "m=c"])


def split(overrides: str) -> list[str]:
    """Split at spaces outside of braces."""
    found: list[str] = []
    for override in overrides.split():
        if found and found[-1].count("{") > found[-1].count("}"):
            found[-1] += f" {override}"
        else:
            found.append(override)
    return found


@pytest.mark.parametrize("group", ["data", "task", "trainer", "callback", "logger", "launch", "search", "export"])
def test_groups_that_commands_build_need_no_reference(project: Project, group: str) -> None:
    write(project.root, f"{group}/own", "k: 1")
    cfg = compose(project, [f"{group}=own"])
    assert (cfg.get(group), cfg.choices[group]) == ({"k": 1}, "own")


def test_an_experiment_has_settings_for_several_loggers(project: Project) -> None:
    write(project.root, "logger/one", "one:\n  k: 1\n  l: 2")
    write(project.root, "logger/two", "two:\n  k: 3")
    own = "  one:\n    k: 4\n  two:\n    k: 5\n  three:\n    k: 6\n"
    write(project.root, "experiment/many", f"logger:\n{own}")
    for loggers, expected in (
        ("one", {"one": {"k": 4, "l": 2}, "three": {"k": 6}}),
        ("two", {"two": {"k": 5}, "three": {"k": 6}}),
        ("[one,two]", {"one": {"k": 4, "l": 2}, "two": {"k": 5}, "three": {"k": 6}}),
        ("null", {"three": {"k": 6}}),
    ):
        assert get(compose(project, ["experiment=many", f"logger={loggers}"]), "logger") == expected
    write(project.root, "experiment/new", "logger:\n  two:\n    _target_: a.B\n")
    found = get(compose(project, ["experiment=new", "logger=one"]), "logger")
    assert found == {"one": {"k": 1, "l": 2}, "two": {"_target_": "a.B"}}


def test_a_project_without_the_main_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/train\.yaml: "):
        compose(Project(tmp_path, None, (tmp_path,)))


def test_settings_of_a_machine_are_merged_over_the_experiment(project: Project) -> None:
    write(project.root, "local", "defaults:\n  m: c\nx: 7")
    assert get(compose(project), "m") == {"z": 3}
    cfg = compose(project, ["experiment=other", "m=b"])
    assert (cfg.x, cfg.m["k"], compose(project, ["x=8"]).x) == (7, 12, 8)
    write(project.root, "local", "m: null")
    assert get(compose(project, ["m=c"]), "m") == {"z": 3}  # the command line wins


def test_an_option_in_place_of_keys_is_refused(project: Project) -> None:
    write(project.root, "experiment/flat", "m: b")
    with pytest.raises(ConfigError, match=r"^experiment=flat: 'm: b' sets no key; write it under defaults$"):
        compose(project, ["experiment=flat"])


def test_an_option_that_is_not_selected_is_named(project: Project) -> None:
    write(project.root, "callback/early", "early: {patience: 3}")
    with pytest.raises(ConfigError, match=r"select it by callback=\[default,early\]$"):
        compose(project, ["+callback=null", "callback.early.patience=1"])


SYNTAX = "write group=option, key=value, +key=value or ~key"


@pytest.mark.parametrize(
    ("override", "setting", "remedy"),
    [
        ("m=d", "m=d: ", "a, b, both, c"),
        ("o=sgdd", "o=sgdd: ", "did you mean sgd?"),
        ("m.kk=1", "m.kk: ", "did you mean m.k?"),
        ("k=1", "k: ", "did you mean m.k?"),
        ("+z.=1", "+z.=1: ", SYNTAX),
        ("quite.else=1", "quite.else: ", "--print"),
        ("m.quite_else=1", "m.quite_else: ", "+m.quite_else=…"),
        ("m.l.2=1", "m.l.2: ", "did you mean m.l?"),
        ("x.z=1", "x.z: ", "--print"),
        ("~nope", "nope: ", "--print"),
        ("~x=1", "~x=1: ", "write ~x"),
        ("x", "x: ", SYNTAX),
        ("", "'': ", SYNTAX),
        ("~", "~: ", SYNTAX),
        ("configs/experiment/e.yaml", "configs/experiment/e.yaml: ", "write experiment=configs/experiment/e.yaml"),
        ("+", "+: ", SYNTAX),
        ("=1", "=1: ", SYNTAX),
        ("-x=1", "-x=1: ", SYNTAX),
        ("+~x=1", "+~x=1: ", SYNTAX),
        ("a b=1", "a b=1: ", SYNTAX),
        ("x=[1", "x: ", "'x=[1,2]'"),
        ("x=${", "x=${: ", ""),
        ("../x=1", "../x=1: ", SYNTAX),
        ("+password=1234", "password: ", "'password=${oc.env:PASSWORD}'"),
        ("+m.api_key=abc", "m.api_key: ", "'m.api_key=${oc.env:API_KEY}'"),
        ("+hf_token=abc", "hf_token: ", "'hf_token=${oc.env:HF_TOKEN}'"),
        ("+m.token=abc", "m.token: ", "'m.token=${oc.env:TOKEN}'"),
    ],
)
def test_mistakes_in_overrides(project: Project, override: str, setting: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(project, [override])
    assert str(error.value).startswith(setting)
    assert remedy in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "override", "mistake"),
    [
        ("m/a", "k: 1\nl: [1", "x=1", "m/a.yaml:3: not valid YAML: "),
        ("m/a", "k: 1\n\tl: 2", "x=1", "m/a.yaml:2: not valid YAML: "),
        ("m/a", "k: 1\nk: 2", "x=1", "m/a.yaml:2: not valid YAML: found duplicate key"),
        ("m/a", "- 1", "x=1", "m/a.yaml: expected keys with values, found a list"),
        ("m/a", "k: ${", "x=1", "m/a.yaml: "),
        pytest.param("m/a", "k: " + "${" * 9000 + "a" + "}" * 9000, "x=1", "a.yaml: it is nested more than", id="deep"),
        pytest.param("m/a", "k: " + "x" * (1 << 20), "x=1", "m/a.yaml: it has more than 1048576 char", id="large"),
        pytest.param("m/a", "k: ${m.k0}\n" + MULTIPLYING, "x=1", "its references multiply to", id="multiplying"),
        ("m/a", "defaults: a", "x=1", "m/a.yaml: inherits from itself"),
        ("m/a", "defaults: nope", "x=1", "m=nope: no such option"),
        ("m/a", "defaults: {o: sgd}", "x=1", "m=a: only an experiment's defaults can pick o"),
        ("m/a", "password: abc", "x=1", "m.password: a secret must not be stored"),
        ("experiment/e", "defaults: {n: a}", "experiment=e", "n: no such group; did you mean"),
        ("train", "defaults: [a]", "x=1", "train.yaml: defaults must name an option of each group"),
    ],
)
def test_mistakes_in_files(project: Project, name: str, text: str, override: str, mistake: str) -> None:
    if name == "experiment/e":
        write(project.root, "nn/a", "k: 1")
    write(project.root, name, text)
    with pytest.raises(ConfigError) as error:
        compose(project, [override])
    assert mistake in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_text(project: Project) -> None:
    (project.root / "m" / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"m/a\.yaml: "):
        compose(project)


def test_an_option_may_be_a_path(project: Project, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("defaults: a\nk: 5\n")
    cfg = compose(project, [f"m={own}"])
    assert get(cfg, "m") == A | {"k": 5}
    assert cfg.name == "mine"
    assert get(compose(project, [f"m=[c,{own}]"]), "m.z") == 3


def test_a_missing_value_stays_missing(project: Project) -> None:
    write(project.root, "m/a", "k: ???")
    cfg = compose(project)
    assert cfg.m["k"] == "???"
    assert compose(project, ["m.k=3"]).m["k"] == 3


def test_environment_variables(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    assert compose(project, ["x=${oc.env:PLACE}/data"]).x == "/scratch/data"
    assert compose(project, ["x=${oc.env:NO_SUCH_PLACE,here}"]).x == "here"


def test_a_reference_to_a_secret_is_accepted(project: Project) -> None:
    cfg = compose(project, ["+m.api_key=${oc.env:KEY}"])
    assert cfg.written["m"]["api_key"] == "${oc.env:KEY}"


@pytest.mark.parametrize("override", ["+m.pad_token=<pad>", "+m.tokens=3", "+m.password=null", "+m.token=''"])
def test_names_like_those_of_secrets_are_accepted(project: Project, override: str) -> None:
    compose(project, [override])


def test_overrides_of_an_earlier_result(project: Project) -> None:
    first = compose(project, ["experiment=e", "x=3"])
    first = first.changed({"choices": {"gone": "a"}})  # of a group that the configuration no longer has
    again = compose(project, ["m.k=6"], base=first)
    assert "gone" not in again.choices
    assert get(again, "m") == {"k": 6, "l": [7], "shape": 3}
    assert again.x == 3
    assert get(compose(project, ["o=sgd"], base=first), "o") == SGD
    assert first.m["k"] == 2


def test_merge_changes_neither_argument() -> None:
    below, above = {"a": {"b": 1}}, {"a": {"c": "${a.b}"}}
    assert merge(below, above) == {"a": {"b": 1, "c": "${a.b}"}}
    assert (below, above) == ({"a": {"b": 1}}, {"a": {"c": "${a.b}"}})


def test_options_of_a_group_have_summaries(project: Project) -> None:
    assert {name: summary(file) for name, file in project.groups()["m"].items()} == {
        "a": "The first.",
        "b": "The second.",
        "both": "",
        "c": "",
    }


@pytest.mark.parametrize(
    "option",
    [f"{p.parent.name}={p.stem}" for p in PROJECT.config_dirs[0].glob("*/*.yaml")] + ["callback=[default,ema]"],
)
def test_every_option_of_the_project_composes(option: str) -> None:
    compose(PROJECT, [option])


def test_composing_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, boltcutter.config.compose; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False False\n"


def test_presets_for_debugging_are_merged_over_the_experiment(tmp_path: Path) -> None:
    cfg = compose(PROJECT, ["experiment=mnist", "debug=[overfit,anomaly]"])
    assert (cfg.trainer["max_epochs"], cfg.trainer["detect_anomaly"], cfg.choices["logger"]) == (200, True, "csv")
    assert (cfg.name, cfg.choices["debug"]) == ("mnist-convnet-overfit-anomaly", "overfit+anomaly")
    cfg = compose(PROJECT, ["debug=fast", "trainer.max_epochs=3", "logger=wandb", "name=mine"])
    assert (cfg.trainer["max_epochs"], cfg.choices["logger"], cfg.name) == (3, "wandb", "mine")
    assert "debug" not in compose(PROJECT, []).choices


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1", "seed=2"], "seed=2: seed is given twice, also as seed=1; remove one of the two"),
        (["+x=1", "x=1"], "x=1: x is given twice, also as +x=1; remove one of the two"),
    ],
)
def test_no_key_is_given_twice(overrides: list[str], message: str) -> None:
    refuse_duplicates(overrides[:1])
    with pytest.raises(ConfigError) as refused:
        refuse_duplicates(overrides)
    assert str(refused.value) == message


PATHS = """
runs: runs
paths: {own: own, absolute: /own, home: ~/own, unset: "???", url: "s3://own", reference: "${x}/own", none: null, n: 3}
data: {data_dir: files, more_files: [a.csv, /b.csv], path: name, mode: fast}
tool: {command: "${root}/tool", dir: files}
"""


def test_paths_are_relative_to_the_root_of_the_project(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project.root, "train", FILES["train"] + PATHS)
    root, below = project.root, project.root / "below"
    below.mkdir()
    there: dict[Path, dict[str, Any]] = {}
    for folder in (root, below):
        monkeypatch.chdir(folder)
        there[folder] = compose(project, ["paths.n=7"]).written
    assert there[root]["tool"] == there[below]["tool"] == {"command": f"{root}/tool", "dir": "files"}
    assert (there[root]["runs"], there[root]["paths"]["own"]) == ("runs", "own")
    assert there[below]["runs"] == f"{root}/runs"
    assert there[below]["paths"] == there[root]["paths"] | {"own": f"{root}/own"}
    files = {"data_dir": f"{root}/files", "more_files": [f"{root}/a.csv", "/b.csv"], "path": "name", "mode": "fast"}
    assert there[below]["data"] == files
    (root / "name").touch()  # not the name of a dataset
    given = compose(project, ["runs=runs", "data.data_dir=files"])  # relative to the working directory
    assert (given.runs, given.data["data_dir"], given.data["path"]) == ("runs", "files", f"{root}/name")
    assert compose(project, ["+root=/elsewhere"]).get("tool")["command"] == "/elsewhere/tool"


@pytest.mark.parametrize(("option", "file"), [("a", "a"), ("one", "one"), ("two", "two"), ("{}/m/own.yaml", "own")])
def test_an_option_that_inherits_from_itself_is_refused(project: Project, option: str, file: str) -> None:
    inherited = {"m/a": "a", "m/one": "two", "m/two": "three", "m/three": "one", "m/own": f"{project.root}/m/own.yaml"}
    for name, defaults in inherited.items():
        write(project.root, name, f"defaults: {defaults}")
    (project.root / "other").mkdir()
    searched = Project(project.root, None, (project.root, project.root / "other"))
    with pytest.raises(
        ConfigError, match=rf"^{project.root}/m/{file}\.yaml: inherits from itself; correct its defaults$"
    ):
        compose(searched, [f"m={option.format(project.root)}"])


def test_an_option_with_class_path_is_converted(project: Project) -> None:
    write(project.root, "m/own", "class_path: torch.nn.ReLU")
    assert compose(project, ["m=own"]).written["m"] == {"_target_": "torch.nn.ReLU"}


@pytest.fixture
def with_resolvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose ``own_resolvers`` registers ``twice``."""
    (tmp_path / "pyproject.toml").write_text('[tool.boltcutter]\nresolvers = "own_resolvers"\n')
    text = f"from omegaconf import OmegaConf\nOmegaConf.{REGISTER}('twice', lambda x: 2 * x, replace=True)\n"
    (tmp_path / "own_resolvers.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_resolvers", raising=False)
    return Project.find(tmp_path)


def test_resolvers_of_the_project_are_registered(with_resolvers: Project) -> None:
    try:
        cfg = compose(
            with_resolvers, ["model=mlp", "model.hidden_sizes=['${twice:4}']", "model.num_classes=${twice:5}"]
        )
        assert (cfg.model["hidden_sizes"][0], cfg.model["num_classes"]) == (8, 10)
    finally:
        OmegaConf.clear_resolver("twice")


def test_resolvers_that_cannot_be_imported_are_named(with_resolvers: Project) -> None:
    (with_resolvers.root / "own_resolvers.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"pyproject\.toml: resolvers=own_resolvers .*no_such_module"):
        compose(with_resolvers)
