"""The minimal form of a project does by itself what it says, and takes in what the template learns later."""

import json
from pathlib import Path

import pytest
from test_new import LONG, NEW, ROOT, change, check_whole, python, save, sh, texts
from test_new import template as template


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    python(*NEW, "my-lab", "--minimal", "--to", tmp_path / "my-lab", at=template)
    return tmp_path / "my-lab"


@pytest.mark.parametrize("name", ["my-lab", LONG, "q"])
def test_it_is_small_and_whole_under_any_name(template: Path, tmp_path: Path, name: str) -> None:
    project = tmp_path / name
    python(*NEW, name, "--minimal", "--to", project, at=template)
    check_whole(template, project)
    code = [text for file, text in texts(project) if file.startswith(("src/", "scripts/")) and file.endswith(".py")]
    assert len("".join(code).splitlines()) < 1200
    assert json.loads((project / ".template.json").read_text())["minimal"] is True
    assert sh("git", "status", "--porcelain", at=project) == ""


@pytest.mark.slow
def test_its_types_are_right_and_its_mistakes_told(project: Path) -> None:
    python("-m", "mypy", f"--cache-dir={ROOT}/.mypy_cache", at=project)
    tests = ["tests/test_mistakes.py", "tests/data", "tests/test_train.py::test_a_run_leaves_what_it_takes_to_trace_it"]
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, at=project)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_its_tests_pass(project: Path) -> None:
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", at=project, timeout=800)


def test_it_is_updated_by_the_template(template: Path, tmp_path: Path) -> None:
    sh("git", "clone", "-q", template, tmp_path / "cutter", at=tmp_path)
    template, project = tmp_path / "cutter", tmp_path / "my-lab"
    python(*NEW, "my-lab", "--minimal", "--to", project, at=template)
    assert python(*NEW, "--update", "--from", template, at=project) == "nothing new\n"
    sh("git", "mv", "src/my_lab/model/convnet.py", "src/my_lab/model/vision.py", at=project)
    change(project, "README.md", "## Start\n", "## Start here\n")
    save(project, "mine")
    change(template, "minimal/README.md", "## Train\n", "News of Boltcutter.\n\n## Train\n")
    change(template, "minimal/src/boltcutter/model/convnet.py", '"""\n\nfrom', '"""\n\n# fixed in boltcutter\nfrom')
    change(template, "configs/optimizer/adamw.yaml", "_target_", "# news\n_target_")
    change(template, "configs/optimizer/sgd.yaml", "_target_", "# not for you\n_target_")
    save(template, "news")
    assert "+News of My Lab." in python(*NEW, "--diff", "--from", template, at=project)
    assert "To undo it: git reset --hard" in python(*NEW, "--update", "--from", template, at=project)
    readme = (project / "README.md").read_text()
    assert "## Start here\n" in readme
    assert "News of My Lab." in readme
    assert "# fixed in my_lab" in (project / "src/my_lab/model/vision.py").read_text()
    assert "# news" in (project / "configs/optimizer/adamw.yaml").read_text()
    assert len(sh("git", "status", "--porcelain", at=project).splitlines()) == 4


def test_it_is_minimal_or_without_parts(template: Path, tmp_path: Path) -> None:
    words = [*NEW, "my-lab", "--minimal", "--without=bench", "--to", tmp_path / "my-lab"]
    assert "--without bench: a minimal project has none of these parts" in python(*words, at=template, status=2)


def test_cookiecutter_asks_for_it(template: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path}/clones\nreplay_dir: {tmp_path}/replay\n")
    answers = ["project_slug=my-lab", "minimal=true", "bench=false"]
    python("-m", "cookiecutter", "--no-input", "--config-file", config, template, *answers, at=tmp_path)
    state = json.loads((tmp_path / "my-lab" / ".template.json").read_text())
    assert (state["minimal"], state["without"]) == (True, [])
    assert not (tmp_path / "my-lab" / "docs").exists()
