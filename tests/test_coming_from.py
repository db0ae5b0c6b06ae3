"""The tables of docs/coming-from.md name settings that exist, and agree with what is translated."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from test_docs import check

import boltcutter
from boltcutter.assembly.assemble import read_config
from boltcutter.cli.main import FLAGS
from boltcutter.cli.translate import translate
from boltcutter.config.foreign import OPTIONS, RENAMED
from boltcutter.config.locate import locate
from boltcutter.project import Project

ROOT = Path(__file__).parents[1]
PROJECT = Project.find(ROOT)
TEXT = (ROOT / "docs" / "coming-from.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in TEXT.split("\n## ")[1:]}
FILES = {".env", "config.yaml", "configs/local.yaml", "defaults", "_target_", "data: x", "metrics.csv"}
FILES |= {"best.ckpt", "last.ckpt", "checkpoints/best.ckpt", "classes.csv", "confusion.csv"}
OF_READERS = re.compile(
    r"nn\.|self\.|training_step|collate_fn|=mine|data\.(?:path|group|fill)|class_weights|hidden_sizes"
)


def rows(section: str) -> list[tuple[list[str], list[str]]]:
    """The code in the first two columns of each row of a table."""
    found = []
    for line in SECTIONS[section].splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 3 and "`" in cells[0]:
            found.append((re.findall("`([^`]+)`", cells[0]), re.findall("`([^`]+)`", cells[1])))
    return found


TABLES = {name: rows(name) for name in ("lightning-hydra-template", "Lightning CLI", "Plain Lightning")}
OTHERS = [*TABLES.values(), *map(rows, ("Keras", "scikit-learn", "Hugging Face Trainer", "A loop of plain PyTorch"))]
OURS = sorted({setting for table in OTHERS for _, right in table for setting in right} - FILES)
OURS = [setting for setting in OURS if not OF_READERS.search(setting)]
DEFAULTS = rows("What is different by default")


def value_of(config: dict[str, object], key: str) -> object:
    found: object = config
    for name in key.split("."):
        assert isinstance(found, dict)
        assert name in found, key
        found = found[name]
    return found


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    return dict(read_config(PROJECT, []).written)


@pytest.mark.slow
@pytest.mark.parametrize("setting", OURS)
def test_each_setting_on_the_right_exists(setting: str, config: dict[str, object]) -> None:
    if setting.startswith("-m "):
        assert translate(PROJECT, "train", shlex.split(setting))[0] == "search"
    elif setting.startswith("--"):
        assert setting in FLAGS
    elif match := re.fullmatch(r"boltcutter\.(\w+)\(.*\)", setting):
        assert callable(getattr(boltcutter, match[1]))
    elif re.match(r"boltcutter(_\w+)?\.", setting):
        assert callable(locate(setting))
    elif setting.startswith("boltcutter "):
        _, name, *arguments = shlex.split(setting)
        check(PROJECT, name, arguments)
    elif "=" in setting:
        arguments = shlex.split(setting)
        group = arguments[0].partition("=")[0]
        check(PROJECT, group if group in ("search", "launch") else "train", arguments)
    elif setting in ("search", "launch"):
        assert setting in PROJECT.groups()
    elif (key := setting.strip("${}")) != "root":
        value_of(config, key)


@pytest.mark.parametrize(
    ("name", "least"), [("lightning-hydra-template", 30), ("Lightning CLI", 15), ("Plain Lightning", 10)]
)
def test_a_table_is_complete(name: str, least: int) -> None:
    assert len(TABLES[name]) >= least


@pytest.mark.parametrize(("theirs", "ours"), RENAMED.items())
def test_renamed_keys_are_in_the_tables(theirs: str, ours: str) -> None:
    """The table has the key, or the reference to it, beside the same key as in the messages of the commands."""
    references = {theirs, f"${{{theirs}}}", f"${{{theirs.replace('hydra.', 'hydra:')}}}"}
    found = [right for table in TABLES.values() for left, right in table if references & {*left}]
    assert found
    assert all(any(re.search(rf"(^|[ {{]){re.escape(ours)}($|[.=}}])", one) for one in right) for right in found)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS.items())
def test_replaced_options_are_in_the_tables(theirs: str, ours: str) -> None:
    theirs = theirs.replace("callback=", "callbacks=")
    (found,) = (right for left, right in TABLES["lightning-hydra-template"] if theirs in left)
    assert found == ours.split(", or ")


@pytest.mark.parametrize(("left", "right"), DEFAULTS, ids=lambda cell: cell[0])
def test_defaults_are_those_of_the_configuration(left: list[str], right: list[str], config: dict[str, object]) -> None:
    (key,), (value,) = left, right
    assert value_of(config, key) == yaml.safe_load(value)


def test_defaults_of_lightning_are_those_of_its_trainer() -> None:
    stated = re.findall(
        r"^\| `trainer\.(\w+)` \| `([^`]+)` \| `([^`]+)`", SECTIONS["What is different by default"], re.M
    )
    assert len(stated) == 5
    for name, ours, theirs in stated:
        default = inspect.signature(Trainer).parameters[name].default
        assert default == yaml.safe_load(theirs) != yaml.safe_load(ours), name


@pytest.mark.parametrize(("inherits", "count"), [("", 1), ("defaults: default\n", 2)])
def test_a_default_of_the_project_replaces_that_of_the_library(inherits: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "configs" / "callback" / "default.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# Mine.\n{inherits}mine:\n  _target_: lightning.pytorch.callbacks.Timer\n")
    project = Project(tmp_path, None, (tmp_path / "configs", ROOT / "configs"))
    found = dict(read_config(project, []).written)["callback"]
    assert ("preemption" in found) == (count == 2)
    assert "mine" in found
