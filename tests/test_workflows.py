"""The GitHub workflows of this repository and of a new project."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*"), *PROJECT.glob(".github/workflows/*")])


def read(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text()))


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_workflow_is_valid(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"] == path.stem
    assert workflow[True]  # YAML reads the key `on` as a boolean
    assert all(job["timeout-minutes"] <= 360 and "runs-on" in job for job in workflow["jobs"].values())
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_workflow_names_existing_files(path: Path) -> None:
    root = PROJECT if PROJECT in path.parents else ROOT
    commands = "\n".join(step["run"] for step in steps(read(path)) if "run" in step)
    named = set(re.findall(r"(?<![\w*/])[\w.{}]+(?:/[\w.]+)+|\b\w+\.(?:toml|txt)", commands))
    cached = set(re.findall(r"hashFiles\((.*?)\)", path.read_text()))
    named |= {name for group in cached for name in re.findall(r"'(.+?)'", group)}
    assert named
    assert [name for name in named if not (root / name).exists()] == []


def test_slow_tests_run_every_night_with_the_documented_command() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "nightly.yml")
    (minute_hour_days,) = workflow[True]["schedule"]
    assert minute_hour_days["cron"].split()[2:] == ["*", "*", "*"]
    assert "pytest -m slow" in {step.get("run") for step in steps(workflow)}
    assert "`pytest -m slow`" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "`pytest -m slow`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(read(path)) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_a_job_that_may_write_runs_no_new_versions() -> None:
    jobs = {(path.stem, name): job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}
    assert all(read(path)["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    writing = {key: job for key, job in jobs.items() if "write" in (job.get("permissions") or {}).values()}
    assert list(writing) == [("newest", "pull-request")]
    for job in writing.values():
        assert not re.search(r"\b(pip|uv|pytest|python)\b", str([step.get("run") for step in job["steps"]]))
