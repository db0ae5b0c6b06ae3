from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from third_party.gallery import overrides

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.search import plan as module
from boltcutter.search.plan import Plan, continued, planned, read_config, save
from boltcutter.search.trial import Sampled

PROJECT = Project.find(Path(__file__))
TRAINING = ["model=linear", "logger=null"]
LR = "search.space.optimizer.lr"


def mistake(*arguments: str, search: str = "optuna") -> str:
    """The one line that a search prints before anything starts."""
    with pytest.raises(ConfigError) as caught:
        planned(PROJECT, [f"search={search}", *TRAINING, *arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "problem", "remedy"),
    [
        (f"{LR}r=uniform(0, 1)", "optimizer.lrr: AdamW takes no such argument", "did you mean lr?"),
        ("search.space.optimzer.lr=uniform(0, 1)", "optimzer", "did you mean optimizer"),
        (f"{LR}=choice(fast, slow)", "optimizer.lr=fast: expected float", ""),
        ("search.space.data.batch_size=uniform(1, 9)", "data.batch_size=3.5", "expected int"),
        ("search.space.optimizer=choice(adamw, sgdd)", "optimizer=sgdd: no such option", "did you mean sgd?"),
        (f"{LR}=uniform(1, 0)", f"{LR}=uniform(1, 0): the range is empty", "smaller bound first"),
        ("~search.space.optimizer.l", "not in the space", "did you mean optimizer.lr?"),
        ("optimizer.lr=0.1", "optimizer.lr=0.1: optimizer.lr is in the search space as well", "remove one of the two"),
        ("search.num_trials=many", "search.num_trials=many: expected int", ""),
        ("search.num_trials=0", "search.num_trials=0: at least 1", "try 1"),
        ("search.num_trial=3", "search.num_trial: Search takes no such argument", "did you mean num_trials?"),
        ("search.engine=remote", "search.engine=remote: expected 'local' | 'ray' | 'wandb'", ""),
        (
            "search.metric=test/accuracy",
            "test/accuracy: a search must not choose by the test split",
            "use a metric of val/",
        ),
        ("search.metric=[val/loss,val/f1]", "search.mode: not set for val/f1", "set search.mode="),
    ],
)
def test_mistakes(argument: str, problem: str, remedy: str) -> None:
    message = mistake(argument)
    assert problem in message
    assert remedy in message


def test_a_metric_that_is_not_logged() -> None:
    message = mistake("search.metric=val/acuracy", "search.mode=max")
    assert message.startswith("search.metric=val/acuracy is never logged; did you mean val/accuracy? (there are: ")


def test_a_choice_of_which_a_grid_would_draw_one() -> None:
    message = mistake(f"{LR}=choice(0.1, 0.01)", search="grid")
    assert message.startswith(f"{LR}=choice(0.1, 0.01): a search of one trial for each combination of grids draws one")
    assert "write grid(…) to try each" in message


def test_nothing_to_search() -> None:
    assert "nothing to search; add search.space.optimizer.lr=" in mistake("search.seeds=null", search="seeds")
    with pytest.raises(ConfigError, match=r"search: not set; give search=… \(there are: asha, .*wandb\)"):
        planned(PROJECT, TRAINING)
    with pytest.raises(ConfigError, match=r"^search: not set; give search=…"):
        planned(PROJECT, ["search=[]"])
    for value in ("a", "[1]", "3"):
        with pytest.raises(
            ConfigError, match=r"^search\.space=.*: expected values by key; set search\.space\.<key>=…$"
        ):
            planned(PROJECT, ["search=optuna", f"search.space={value}"])


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
@pytest.mark.parametrize("argument", ["callback.preemption=null", "checkpoints=elsewhere"])
def test_a_population_needs_checkpoints_on_request_and_beside_the_run(argument: str) -> None:
    message = mistake(argument, search="pbt")
    assert message.startswith(f"{argument}: ")
    assert "remove" in message


def test_a_scheduler_belongs_to_an_engine() -> None:
    expected = "search.engine=local takes a pruner of Optuna; choose another, or null"
    for target in ("torch.nn.Identity", "optuna.samplers.RandomSampler"):
        message = mistake(f"search.scheduler={{_target_: {target}}}")
        assert message == f"search.scheduler={target.rpartition('.')[2]}: {expected}"
    if find_spec("ray"):
        assert mistake("search.engine=local", search="asha").endswith(expected)
        assert mistake("search.engine=ray").endswith(
            "search.engine=ray takes a scheduler of Ray Tune; choose another, or null"
        )
    message = mistake("search.scheduler={_target_: optuna.pruners.NopPruner}", search="wandb")
    assert message == "search.scheduler=NopPruner: search.engine=wandb takes none; choose another, or null"


def test_a_sampler_is_one_of_optuna_and_made_for_each_trial() -> None:
    message = mistake("search.sampler={_target_: optuna.pruners.NopPruner, _partial_: true}")
    assert message.startswith("search.sampler=NopPruner: search.engine=local takes a sampler of Optuna; ")
    message = mistake("search.sampler={_target_: optuna.samplers.RandomSampler}")
    assert message.endswith("; write search.sampler._partial_=true")


@pytest.mark.parametrize(("search", "package"), [("optuna", "optuna"), ("asha", "ray")])
def test_a_package_that_is_not_installed(search: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else object())
    assert mistake(search=search) == (
        f"search.engine={'ray' if search == 'asha' else 'local'}: {package} is not installed; "
        f"pip install 'boltcutter[{package}]'"
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A search that was planned and saved. Do not modify."""
    folder = tmp_path_factory.mktemp("plan") / "search"
    space = ["search.space.optimizer=choice(adamw, sgd)", "search.space.data.batch_size=grid(32, 64)"]
    limits = ["search.num_trials=3", "seed=7", f"folder={folder}"]
    plan = planned(PROJECT, ["search=optuna", *TRAINING, *space, *limits])
    folder.mkdir()
    save(plan)
    return plan


def test_a_plan(made: Plan) -> None:
    assert made.overrides == [*TRAINING, "seed=7"]
    assert made.metrics == [("val/loss", "min")]
    assert (made.total, made.fixed) == (6, [{"data.batch_size": "32"}, {"data.batch_size": "64"}])
    assert (made.devices, made.gpus) == (1, 0)
    trial = made.make_trial(Sampled(12, {"optimizer.lr": 0.5, "optimizer": "sgd"}), {"CUDA_VISIBLE_DEVICES": "1"})
    assert trial.folder == made.folder / "trials" / "0012"
    assert trial.overrides == ["test=false", "report=false", *made.overrides, "optimizer.lr=0.5", "optimizer=sgd"]
    assert trial.environment == {"WANDB_RUN_GROUP": "search", "CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("task", "expected"), [("autoencoder", ("val_loss", "min")), ("finetuning", ("val_acc", "max"))]
)
def test_the_metric_of_a_module_that_does_not_declare_it(task: str, expected: tuple[str, str], tmp_path: Path) -> None:
    arguments = ["search=seeds", *overrides(task), "logger=null", f"folder={tmp_path}/search"]
    assert planned(PROJECT, arguments).metrics == [expected]


def test_a_search_is_continued_as_it_was(made: Plan) -> None:
    plan = continued(PROJECT, made.folder, [])
    assert {**vars(plan), "search": None} == {**vars(made), "search": None}
    assert [p.distribution for p in plan.space.parameters] == [p.distribution for p in made.space.parameters]
    more = continued(PROJECT, made.folder, ["search.num_trials=5", "search.max_time=1:00:00"])
    assert (more.total, more.search.time_limit) == (10, 3600)
    save(replace(made, command="boltcutter search budget=5m 'name=a b' search.num_trials=2"))
    more = continued(PROJECT, made.folder, ["search.num_trials=5", "search.max_time=1:00:00"])
    assert more.command == "boltcutter search search.max_time=1:00:00 'name=a b' search.num_trials=5"
    assert continued(PROJECT, made.folder, ["budget=30m"]).search.time_limit == 1800
    assert read_config(PROJECT, ["search=optuna", "budget=30m"]).get("search")["max_time"] == "30m"


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("/bin/boltcutter search 'name=a b' search=grid", "boltcutter search 'name=a b' search=grid"),
        ("scripts/search.py search=grid", "python scripts/search.py search=grid"),
        ("other/train.py search=grid seed=1", "boltcutter search search=grid seed=1"),  # by -m, without a script
    ],
)
def test_the_command_of_a_search(started: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "search.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(started))
    assert module.own_command() == expected


@pytest.mark.parametrize(
    "override",
    ["search.space.optimizer.lr=uniform(0, 1)", "search.seed=1", "optimizer.lr=0.1", "search=grid", "seed=1"],
)
def test_a_search_that_is_continued_keeps_its_settings(made: Plan, override: str) -> None:
    with pytest.raises(ConfigError, match=r"keeps its settings, apart from .*; remove it") as caught:
        continued(PROJECT, made.folder, [override])
    assert str(caught.value).startswith(f"{override}: ")


def test_folders(made: Plan, tmp_path: Path) -> None:
    message = mistake(f"folder={made.folder}")
    assert message == f"folder={made.folder} holds a search; use resume={made.folder}, or another folder"
    with pytest.raises(ConfigError, match=r"no search there \(search.json is missing\); give the folder of one"):
        continued(PROJECT, tmp_path, [])
    (tmp_path / "search.json").write_text('{"settings":')
    with pytest.raises(ConfigError, match=r"search.json is damaged .*; restore it from a copy"):
        continued(PROJECT, tmp_path, [])


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": ["+callback.x._target_=os.mkdir"]},
        {"overrides": ["trust=true"]},
        {"fixed": [{"+callback.x._target_": "os.mkdir"}]},
        {"metrics": [["val/accuracy", "max"]]},
        {"devices": 8},
    ],
    ids=str,
)
def test_all_that_a_search_takes_from_its_record_is_signed(made: Plan, tmp_path: Path, change: dict[str, Any]) -> None:
    record = json.loads((made.folder / "search.json").read_text())
    (tmp_path / "search.json").write_text(json.dumps(record | {"command": "other"}))
    continued(PROJECT, tmp_path, [])
    (tmp_path / "search.json").write_text(json.dumps(record | change))
    with pytest.raises(ConfigError, match=r"you have not signed; set trust=true"):
        continued(PROJECT, tmp_path, [])


@pytest.mark.parametrize(
    "values",
    [
        {"+callback.x._target_": "os.mkdir"},
        {"optimizer": "sgd optimizer.lr=9"},
        {"optimizer.lr": "${oc.env:HOME}"},
        {"seed": 3},
    ],
    ids=str,
)
def test_values_of_a_journal_are_of_the_space(made: Plan, values: dict[str, Any]) -> None:
    made.make_trial(Sampled(0, {"optimizer": "adamw", "data.batch_size": "64", "optimizer.lr": 0.01}), {})
    with pytest.raises(ConfigError, match=r"^the journal of the search has .*, which it does not sample; remove it$"):
        made.make_trial(Sampled(0, values), {})


def test_settings_of_another_are_not_instantiated(made: Plan, tmp_path: Path) -> None:
    record = json.loads((made.folder / "search.json").read_text())
    record["settings"]["sampler"] = {"_target_": "os.system", "command": f"touch {tmp_path}/called"}
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"os\.system"):
        continued(PROJECT, tmp_path, [])
    assert not (tmp_path / "called").exists()
