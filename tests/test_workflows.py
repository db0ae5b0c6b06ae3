"""The GitHub workflows of this repository and of a new project."""

import re
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SECONDS, run_command, shards
from new_project import run
from packaging.requirements import Requirement

from boltcutter.project import tomllib

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
    named = set(re.findall(r"(?<![\w*/$.])(?!github\.com/)[\w.{}]+(?:/[\w.]+)+|(?<!\w)\.?\w+\.(?:toml|txt)", commands))
    cached = set(re.findall(r"hashFiles\((.*?)\)", path.read_text()))
    named |= {name for group in cached for name in re.findall(r"'(.+?)'", group)}
    assert named
    ignored = (ROOT / ".gitignore").read_text().split()
    named = {name for name in named if f"{name.partition('/')[0]}/" not in ignored and f"> {name}" not in commands}
    assert [name for name in named if not (root / name).exists()] == []


def test_slow_tests_run_every_night_with_the_documented_command() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "nightly.yml")
    (minute_hour_days,) = workflow[True]["schedule"]
    assert minute_hour_days["cron"].split()[2:] == ["*", "*", "*"]
    assert ".venv/bin/pytest -m slow" in {step.get("run") for step in steps(workflow)}
    count = len(workflow["jobs"]["slow"]["strategy"]["matrix"]["shard"])
    (shard,) = (step["env"]["SHARD"] for step in steps(workflow) if "SHARD" in step.get("env", {}))
    assert shard == f"${{{{ matrix.shard }}}}/{count}"
    assert "`pytest -m slow`" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "`pytest -m slow`" in (ROOT / "README.md").read_text()


def test_shards_contain_each_group_of_tests_once() -> None:
    sizes = {f"tests/test_{number}.py": 1 + number % 7 for number in range(40)} | {"cluster": 30}
    found = shards(sizes, 6)
    assert sorted(group for shard in found for group in shard) == sorted(sizes)
    totals = [sum(sizes[group] for group in shard) for shard in found]
    assert max(totals) - min(totals) <= 7
    assert [file for file in SECONDS if file != "cluster" and not (ROOT / file).is_file()] == []


def test_jobs_install_what_their_tests_need() -> None:
    """Where a test's program is missing, the test fails with CI=true, which GitHub sets."""
    for path in WORKFLOWS[:-1]:
        for name, job in read(path)["jobs"].items():
            commands = [step.get("run", "") for step in job["steps"]]
            if any(".venv/bin/pytest" in command for command in commands) and name != "bare":
                assert any(re.search(r"\.ci/(prepare|install)", command) for command in commands), (path.name, name)
                assert read(path)["env"]["UV_TORCH_BACKEND"] == "cpu"
    assert read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["bare"]["env"] == {"CI": "false"}
    assert ".ci/install" in (ROOT / ".ci" / "run").read_text()
    assert ".ci/prepare" in (ROOT / ".ci" / "install").read_text()
    assert all(
        ".ci/uv" in (ROOT / ".ci" / name).read_text() for name in ("install", "prepare")
    )  # wherever it is called


def test_the_command_of_readme_is_installed_by_uv() -> None:
    """With the same packages and constraints; ``.ci/install`` replaces parts of the line, which must be there."""
    (line,) = re.findall(r"^python3 -m venv .* && \.venv/bin/pytest$", (ROOT / "README.md").read_text(), re.M)
    script = (ROOT / ".ci" / "install").read_text()
    for pattern in re.findall(r"\$\{line/(.*?[^\\])/", script):
        assert pattern.replace("\\", "") in line
    assert script.count("${line/") == 2


def test_commands_that_jobs_take_from_readme_are_found() -> None:
    scripts = [step["run"] for path in WORKFLOWS for step in steps(read(path)) if "README.md" in step.get("run", "")]
    assert len(scripts) == 2
    for script in scripts:
        taken, then = script.splitlines()
        assert then == 'bash -c "$line"'
        done = run("bash", "-e", "-c", f'{taken}\necho "$line"', cwd=ROOT)
        assert done.startswith("python3 -m venv .venv && ")


def test_constraints_are_renewed_as_documented() -> None:
    renewed = " ".join(step.get("run", "") for step in steps(read(ROOT / ".github" / "workflows" / "newest.yml")))
    options = "--all-extras --universal --python-version 3.10 --no-annotate --no-header --upgrade"
    for text in (renewed, (ROOT / "CONTRIBUTING.md").read_text()):
        assert options in " ".join(text.replace("\\\n", " ").split())
        assert "cp constraints.txt '{{cookiecutter.project_slug}}'" in text
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    for limit in map(Requirement, limits):
        versions = [version for name, version in pinned if name == limit.name]
        assert versions
        assert all(limit.specifier.contains(version) for version in versions)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_pinned_versions_can_be_installed(version: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "uv", with_pip=True)
    run(
        str(tmp_path / "uv" / "bin" / "pip"),
        "install",
        "-q",
        "--require-hashes",
        "-r",
        str(ROOT / ".ci" / "uv.txt"),
        cwd=tmp_path,
    )
    resolve = ["uv/bin/uv", "pip", "compile", "-q", "--python-version", version, "--all-extras", "-o", "found.txt"]
    run(*resolve, "-c", str(ROOT / "constraints.txt"), str(ROOT / "pyproject.toml"), cwd=tmp_path)
    assert "torch==" in (tmp_path / "found.txt").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(read(path)) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_a_job_that_may_write_runs_no_new_versions() -> None:
    jobs = {(path.stem, name): job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}
    assert all(read(path)["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    writing = {key: job for key, job in jobs.items() if "write" in (job.get("permissions") or {}).values()}
    assert list(writing) == [("newest", "pull-request"), ("release", "publish")]
    for job in writing.values():
        assert not re.search(r"\b(pip|uv|pytest|python)\b", str([step.get("run") for step in job["steps"]]))


def test_artifacts_of_jobs_with_new_versions_are_not_unpacked_over_the_checkout() -> None:
    job = read(ROOT / ".github" / "workflows" / "newest.yml")["jobs"]["pull-request"]
    (taken,) = (step["with"] for step in job["steps"] if "download-artifact" in step.get("uses", ""))
    assert str(taken["path"]).startswith("${{ runner.temp }}/")


def test_tools_of_a_release_are_pinned_with_hashes() -> None:
    runs = " ".join(step.get("run", "") for step in steps(read(ROOT / ".github" / "workflows" / "release.yml")))
    assert "pip install -q --require-hashes -r .github/release.txt" in runs
    assert "python -m build --no-isolation" in runs
    pins = re.findall(
        r"^([\w.-]+)==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", (ROOT / ".github" / "release.txt").read_text(), re.M
    )
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {"build", "twine", *(Requirement(text).name for text in required)} <= {name for name, _ in pins}


def test_workflows_have_no_finding() -> None:
    zizmor = str(Path(sys.executable).with_name("zizmor"))
    done = run_command([zizmor, "--offline", "--no-progress", *(str(file.parents[1]) for file in WORKFLOWS)])
    assert done.returncode == 0, done.stdout


def test_a_release_is_what_was_tested() -> None:
    """Only the artifact of the job that checks, installs and trains is published, by a job that runs nothing of it."""
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    commands = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert all(word in commands for word in ("twine check --strict", "dist/*.whl", 'boltcutter" train', "cyclonedx-py"))
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in jobs["publish"]["steps"])
    uploaded = [s["with"]["path"] for s in jobs["build"]["steps"] if "upload-artifact" in s.get("uses", "")]
    assert uploaded == ["dist", "boltcutter.cdx.json"]
    assert [s["with"].get("path") for s in jobs["publish"]["steps"]] == ["dist", None]


def test_hooks_and_workflows_use_the_same_versions() -> None:
    hooks = {hook["id"]: hook for hook in read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]}
    audit = (ROOT / ".github" / "workflows" / "audit.yml").read_text()
    assert hooks["gitleaks"]["additional_dependencies"][0] in audit
    assert "pip-audit --no-deps --disable-pip -r constraints.txt" in audit
    assert "zizmor" in hooks


@pytest.mark.parametrize("root", [ROOT, PROJECT], ids=["here", "new project"])
def test_keys_are_ignored_and_actions_are_updated(root: Path, tmp_path: Path) -> None:
    run("git", "init", "-q", cwd=tmp_path)
    (tmp_path / ".gitignore").write_text((root / ".gitignore").read_text())
    keys = [".env", ".env.local", "conf/server.pem", "deploy.key", ".env.example"]
    assert run("git", "check-ignore", *keys, cwd=tmp_path).split() == keys[:-1]
    updates = read(root / ".github" / "dependabot.yml")["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["github-actions"]
    assert updates[0]["cooldown"]["default-days"] >= 7


def test_how_to_report_is_said() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert all(word in text for word in ("**Reporting.**", "**Versions.**", "docs/security.md"))
