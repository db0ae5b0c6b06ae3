import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from omegaconf import OmegaConf
from test_mistakes import MISTAKES

from boltcutter.cli.schema import FOLDER, make_schemas, schema_command
from boltcutter.config import locate
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import parse
from boltcutter.project import Project

ROOT = Path(__file__).parents[2]
PROJECT = Project.find(ROOT)
GROUPS = PROJECT.groups()
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]
TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
Faults = Callable[[str, Any], list[str]]


@pytest.fixture(scope="module")
def faults() -> Faults:
    """The faults that a schema finds in the contents of a file."""
    schemas = make_schemas(PROJECT)
    validators = {name: jsonschema.Draft7Validator(schema) for name, schema in schemas.items()}

    def find(name: str, content: Any) -> list[str]:
        return [
            f"{list(error.absolute_path)}: {error.message[:200]}" for error in validators[name].iter_errors(content)
        ]

    return find


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_shipped_options_are_accepted(faults: Faults, group: str, option: str) -> None:
    assert not faults(group, OmegaConf.to_container(OmegaConf.load(GROUPS[group][option])))


def test_train_is_accepted(faults: Faults) -> None:
    assert not faults("train", OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "train.yaml")))


def test_files_of_new_projects_refer_to_schemas_that_accept_them(tmp_path: Path) -> None:
    template = ROOT / "{{cookiecutter.project_slug}}"
    files = [file.relative_to(template) for file in (template / "configs").rglob("*.yaml")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((template / file).read_text().replace("{{ cookiecutter.__package }}", "acme"))
    schemas = make_schemas(Project.at(tmp_path))
    for file in files:
        found = re.search(r"^# yaml-language-server: \$schema=(.+)$", (tmp_path / file).read_text(), re.M)
        assert found
        schema = Path(os.path.normpath(tmp_path / file.parent / found[1]))
        assert schema.parent == tmp_path / FOLDER
        content = OmegaConf.to_container(OmegaConf.load(tmp_path / file))
        assert not [*jsonschema.Draft7Validator(schemas[schema.stem]).iter_errors(content)], file


def as_experiment(overrides: str) -> dict[str, Any]:
    """The file that an experiment with these overrides would be."""
    chosen, values = {}, OmegaConf.create()
    for override in shlex.split(overrides):
        key, _, text = override.lstrip("+").partition("=")
        if key in GROUPS:
            chosen[key] = OmegaConf.to_container(OmegaConf.create({"x": text}))["x"] if text[:1] != "[" else [text]
        else:
            OmegaConf.update(values, key, parse(key, text), force_add=True)
    content = OmegaConf.to_container(values)
    assert isinstance(content, dict)
    return {"defaults": chosen} | content


# Mistakes of a name or type that one file does not show: they depend on options in other files, or on the environment.
ELSEWHERE = {
    "task.loss=mse",  # which the other task has
    "task.metrics.f1.averag=macro",  # torchmetrics checks its keyword arguments itself
    "task.optimizer.lrr=1",  # a reference to another group
    "choices.model=mlp",  # a text, but not set by files
    "model=/nowhere/x.yaml",
    "optimizer._target_=torch.optim.Adamm",  # a class that no option names may be somebody's own
    "optimizer._target_=torch.optimm.Adam",
    "model._target_=ConvNet",
    "optimizer._target_=no_such_package.Adam",
    "optimizer._target_=torch.pi",
    "optimizer._target_=",
    "model._target_=collections.OrderedDict",
    "logger.wandb._target_=lightning.pytorch.loggers.WandbLogger logger.wandb.entitty=me",
    "+callback.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
}
OF_FILES = [one for one, *_ in MISTAKES if not one.startswith(("-", "~", "+-")) and "third_party" not in one]
# Those below are of values, and of what belongs together.
NAMES_AND_TYPES = OF_FILES[: OF_FILES.index("trainer.max_epochs=???")]


@pytest.mark.parametrize("overrides", NAMES_AND_TYPES)
def test_mistakes_of_names_and_types_are_refused(faults: Faults, overrides: str) -> None:
    assert bool(faults("experiment", as_experiment(overrides))) == (overrides not in ELSEWHERE)


@pytest.mark.parametrize("name", ["experiment", "train"])
def test_a_misspelt_group_among_the_defaults_is_refused(faults: Faults, name: str) -> None:
    assert not faults(name, {"defaults": {"model": "mlp"}})
    assert faults(name, {"defaults": {"modle": "mlp"}})


def test_values_and_arguments_of_a_component_are_described() -> None:
    schema = make_schemas(PROJECT)["model"]
    assert schema["definitions"]["boltcutter.model.mlp.MLP"]["else"]["properties"]["hidden_sizes"]["description"]
    assert "torch.optim.AdamW" in schema["definitions"]


def test_a_class_whose_arguments_need_a_missing_package_accepts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_tensorboard(path: str, original: Callable[[str], Any] = locate.locate) -> Any:
        if path == "torch.utils.tensorboard.SummaryWriter":
            raise ConfigError(f"{path} needs tensorboard, which is not installed")
        return original(path)

    monkeypatch.setattr(locate, "locate", without_tensorboard)
    locate.parameters.cache_clear()
    logger = jsonschema.Draft7Validator(make_schemas(PROJECT)["logger"])
    assert logger.is_valid({"tensorboard": {"_target_": TENSORBOARD, "log_dir": "x", "nothing": 1}})
    assert not logger.is_valid({"wandb": {"_target_": "boltcutter.logger.wandb.WandbLogger", "nothing": 1}})


def test_the_command_writes_a_file_for_each_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "acme"\n')
    (tmp_path / "configs" / "model" / "mine.yaml").write_text("_target_: acme.none.Net\nwidth: 3\n")
    project = Project.at(tmp_path)
    schema_command(project, [])
    written = {file.stem for file in (tmp_path / FOLDER).iterdir()}
    assert {*GROUPS, "train"} <= written
    assert "$schema=../../.boltcutter/schema/model.json" in capsys.readouterr().out
    model = jsonschema.Draft7Validator(json.loads((tmp_path / FOLDER / "model.json").read_text()))
    assert model.is_valid({"_target_": "acme.none.Net", "width": 3})  # cannot be imported: nothing is known
    assert not model.is_valid({"_target_": "boltcutter.model.mlp.MLP", "width": 3})
    with pytest.raises(ConfigError, match="x: schema takes no such argument; remove it"):
        schema_command(project, ["x"])
    (tmp_path / "configs" / "model" / "mine.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"mine.yaml:\d+: not valid YAML"):
        schema_command(project, [])


def test_schemas_are_not_written_through_a_link_of_somebody_else(
    tmp_path: Path, hand_over: Callable[[Path], None]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).parent.mkdir(exist_ok=True)
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    hand_over(tmp_path / FOLDER)
    with pytest.raises(ConfigError, match="a link of another user; remove it"):
        schema_command(Project.at(tmp_path), [])
