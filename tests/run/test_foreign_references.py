from pathlib import Path
from typing import Any

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run.foreign_references import check_references

PROJECT = Project.find(__file__)


def project(folder: Path, content: str) -> Project:
    (folder / "configs" / "logger").mkdir(parents=True)
    (folder / "configs" / "logger" / "mine.yaml").write_text(content)
    (folder / "pyproject.toml").write_text("[tool.boltcutter]\n")
    return Project.find(folder)


@pytest.mark.parametrize(
    "node",
    [
        {"a": "${b}", "b": 1},
        {"a": "${b}/${b}", "b": "x"},
        {"model": {"shape": "${data.shape}"}, "data": {"shape": [1]}},
        {"a": [{"b": "${c}"}] * 100, "c": "x" * 100},
        {"a": ["${b}-${c}"] * 17, "b": 1, "c": 2, "num_nodes": "${oc.decode:${oc.env:BOLTCUTTER_NODES,1}}"},
    ],
)
def test_references_to_other_settings_are_allowed(node: Any) -> None:
    check_references(node, "run=x", PROJECT)


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ({"a": "${oc.env:HOME}"}, "reads your environment"),
        ({"a": "${oc.env:HOME,x}"}, "reads your environment"),
        ({"a": "s3://theirs/${oc.env:PIP_INDEX_URL}"}, "reads your environment"),
        ({"a": "${oc.create:{_target_: os.system}}"}, "computes a value or reads a secret"),
        ({"a": "${oc.env:WANDB_API_KEY}"}, "computes a value or reads a secret"),
        ({"a": "${b}", "b": "${c}" * 1000, "c": "${d}" * 1000, "d": "x" * 1000}, "which multiply"),
    ],
)
def test_references_that_compute_read_or_multiply_are_refused(node: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run=x: .*{fault}.*trust=true") as error:
        check_references(node, "run=x", PROJECT)
    assert "\n" not in str(error.value)


def test_the_environment_is_read_where_the_project_does_and_nowhere_else(tmp_path: Path) -> None:
    own = project(tmp_path, "uri: ${oc.env:TRACKING}\n")
    (own.root / "configs" / "logger" / "half_written.yaml").write_text("a: [${oc.env:HOME}\n")  # nothing selects it
    check_references({"logger": {"mine": {"uri": "${oc.env:TRACKING}"}}}, "run=x", own)
    for node in ({"other": "${oc.env:TRACKING}"}, {"uri": "http://theirs/${oc.env:TRACKING}"}):
        with pytest.raises(ConfigError, match="reads your environment"):
            check_references(node, "run=x", own)
    spread: dict[str, Any] = {"uri": "${oc.env:TRACKING}", "url": "http://theirs/${uri}"}
    with pytest.raises(ConfigError, match="which holds a value of your environment"):
        check_references(spread, "run=x", own)
