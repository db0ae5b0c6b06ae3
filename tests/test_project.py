import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.config import redaction
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.project import BUILTIN_CONFIGS, Project, ProjectError, command, display_path, install_command

ROOT = Path(__file__).parents[1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with an option of its own, one that extends a built-in option, and its own defaults."""
    files = {
        "pyproject.toml": '[tool.boltcutter]\npackage = "small"\n',
        "src/small/__init__.py": "",
        "configs/model/tiny.yaml": "# A tiny model.\n_target_: small.Tiny\n",
        "configs/model/mlp.yaml": "# A small MLP.\ndefaults: mlp\nhidden_sizes: [8]\n",
        "configs/train.yaml": "# Defaults.\ndefaults:\n  model: mlp\nseed: 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_found_from_any_file_or_folder_in_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Project(root, "small", (root / "configs", BUILTIN_CONFIGS))
    assert Project.find(root / "configs" / "train.yaml") == expected
    assert Project.find(root / "src" / ".." / "configs" / "train.yaml") == expected  # as of python ../scripts/train.py
    monkeypatch.chdir(root / "src" / "small")
    assert Project.find() == expected
    monkeypatch.chdir("/")
    monkeypatch.setenv("BOLTCUTTER_PROJECT", str(root))
    assert Project.find() == expected


def test_a_project_of_another_user_is_used_only_by_name(
    root: Path, monkeypatch: pytest.MonkeyPatch, hand_over: Callable[[Path], None]
) -> None:
    """As with git in a folder below one of somebody else: their code would run, and their .env be read."""
    (inner := root / "inner").mkdir()
    monkeypatch.delenv("BOLTCUTTER_PROJECT", raising=False)
    monkeypatch.chdir(inner)
    hand_over(root)
    with pytest.raises(ProjectError, match=r"belongs to another user .* BOLTCUTTER_PROJECT=") as error:
        Project.find()
    assert "\n" not in str(error.value)
    monkeypatch.setenv("BOLTCUTTER_PROJECT", str(root))
    assert Project.find().root == root
    monkeypatch.delenv("BOLTCUTTER_PROJECT")
    assert Project.find(root / "pyproject.toml").root == root  # as scripts/train.py does, which runs already
    (root / "pyproject.toml").unlink()
    with pytest.raises(ProjectError, match="belongs to another user"):
        Project.find()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="is refused, as python -m imports from the working directory")
def test_nothing_of_a_folder_in_which_others_may_write_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp: whoever puts a src, a .env or a module there would execute it in each command that is started there."""
    (tmp_path / "src" / "boltcutter").mkdir(parents=True)
    (tmp_path / "src" / "boltcutter" / "__init__.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").touch()
    (tmp_path / ".env").write_text("PLANTED=1\n")
    tmp_path.chmod(0o1777)
    monkeypatch.delenv("BOLTCUTTER_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", before := [*sys.path])
    project = Project.find()
    assert project.unused_vendored_library() is None
    assert project.train_command[0] == "-m"
    assert project.environment == {}
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    project.activate()
    assert os.environ["PYTHONSAFEPATH"] == "1"  # python -m would import modules of the working directory
    assert sys.path == before
    assert "PLANTED" not in os.environ
    (tmp_path / "configs").mkdir()
    with pytest.raises(ProjectError, match="others may write to it, and its configs would be executed"):
        Project.find()
    monkeypatch.setenv("BOLTCUTTER_PROJECT", str(tmp_path))
    assert Project.find().config_dirs[0] == tmp_path / "configs"


@pytest.mark.parametrize("part", ["configs", "src", "scripts", ".env", "pyproject.toml", "small"])
def test_no_part_of_a_project_in_a_folder_of_all_belongs_to_another_user(
    root: Path, part: str, monkeypatch: pytest.MonkeyPatch, hand_over: Callable[[Path], None]
) -> None:
    monkeypatch.delenv("BOLTCUTTER_PROJECT", raising=False)
    monkeypatch.chdir(root)
    root.chmod(0o777)
    assert Project.find().root == root
    if not (root / part).exists():
        (root / part).mkdir()
    hand_over(root / part)
    with pytest.raises(ProjectError, match="belongs to another user"):
        Project.find()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "endless", "large"])
def test_a_pyproject_above_of_somebody_else_neither_blocks_nor_takes_memory(tmp_path: Path, kind: str) -> None:
    above = tmp_path / "pyproject.toml"
    if kind == "fifo":
        os.mkfifo(above)
    elif kind == "endless":
        above.symlink_to("/dev/zero")
    else:
        with above.open("wb") as file:
            file.truncate(1 << 40)
    (inner := tmp_path / "inner").mkdir()
    assert Project.find(inner).root == inner


def test_the_nearest_project_counts(root: Path) -> None:
    inner = root / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[project]\nname = "inner"\n')  # a package, but no project
    assert Project.find(inner).root == root
    (inner / "pyproject.toml").write_text("[tool.boltcutter]\n")
    assert Project.find(inner) == Project(inner, None, (BUILTIN_CONFIGS,))


def test_any_folder_can_be_used_with_built_in_options(tmp_path: Path) -> None:
    assert Project.find(tmp_path) == Project(tmp_path, None, (BUILTIN_CONFIGS,))


def test_a_folder_is_a_project_by_its_files_or_because_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOLTCUTTER_PROJECT", raising=False)
    assert not Project.find(tmp_path).is_declared
    (tmp_path / "configs").mkdir()
    assert Project.find(tmp_path).is_declared
    (tmp_path / "configs").rmdir()
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter]\n")
    assert Project.find(tmp_path).is_declared
    (tmp_path / "pyproject.toml").unlink()
    monkeypatch.setenv("BOLTCUTTER_PROJECT", str(tmp_path))
    assert Project.find().is_declared


@pytest.mark.parametrize("text", ["[tool.boltcutter]\n", None])
def test_a_run_folder_is_no_project(root: Path, text: str | None) -> None:
    """Its modules, options and ``.env`` could be somebody else's; the code that a launcher copies into it is one."""
    for place in (run := root / "runs" / "a", run / "code"):
        place.mkdir(parents=True)
        if text:
            (place / "pyproject.toml").write_text(text)
    (run / "record.json").touch()
    if text is None:  # the project around it
        assert Project.find(run).root == root
        (root / "pyproject.toml").unlink()
    with pytest.raises(ProjectError, match=rf"^{run}: a run folder is no project; change to the folder of your"):
        Project.find(run)
    assert Project.find(run / "code").root == run / "code"


def test_the_library_repository_is_a_project() -> None:
    assert Project.find(__file__) == Project(ROOT, "boltcutter", (ROOT / "configs",))


WRONG = ["[tool.boltcutter", "[tool]\nboltcutter = 3", '[tool.boltcutter]\npackage = "a-b"\n']


@pytest.mark.parametrize("text", [*WRONG, "[tool.boltcutter]\nresolvers = 3", '[tool.boltcutter]\nresolvers = "a b"'])
def test_mistakes_in_pyproject(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"{text}\n")
    with pytest.raises(ProjectError, match=r"pyproject\.toml: "):
        Project.find(tmp_path)


def test_options_of_the_project_come_before_built_in_ones(root: Path) -> None:
    project = Project.find(root)
    options = project.groups()["model"]
    assert {"tiny", "mlp", "convnet"} < options.keys()
    assert options["mlp"] == root / "configs" / "model" / "mlp.yaml"
    assert [project.origin(options[name]) for name in ("tiny", "mlp", "convnet")] == ["project", "project", "built-in"]
    cfg = compose(project)
    assert cfg.choices["model"] == "mlp"
    assert cfg.model["_target_"] == "boltcutter.model.mlp.MLP"  # inherited from the built-in option of the same name
    assert (cfg.model["hidden_sizes"], cfg.seed, cfg.choices["data"]) == ([8], 7, "digits")
    with pytest.raises(ConfigError, match=r"^model=tin: .* tiny\? \(project: mlp, tiny; built-in: "):
        compose(project, ["model=tin"])


def test_paths_in_files_begin_in_the_root_of_the_project(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    cfg = compose(Project.find(), ["data=mnist"])
    assert (cfg.runs, cfg.data["folder"]) == ("runs", "data/mnist")
    monkeypatch.chdir(root / "src")
    cfg = compose(Project.find(), ["data=mnist"])
    assert (cfg.runs, cfg.data["folder"]) == (str(root / "runs"), str(root / "data" / "mnist"))
    cfg = compose(Project.find(), ["data=mnist", "runs=a", "data.folder=../b"])
    assert (cfg.runs, cfg.data["folder"]) == ("a", "../b")
    monkeypatch.chdir("/")  # a script that is started from anywhere else
    assert compose(Project.find(root)).runs == "runs"


def test_all_paths_in_files_begin_in_the_root_of_the_project(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "configs" / "paths").mkdir()
    (root / "configs" / "paths" / "mine.yaml").write_text(
        "# Folders.\ndata_dir: data/\ncache: ~/cache\noutput: ${.data_dir}out\nmore: [a, /b, 's3://c']\n"
    )
    (root / "configs" / "data").mkdir()
    (root / "configs" / "data" / "mine.yaml").write_text(
        "# Mine.\n_target_: small.Data\nroot: ${paths.data_dir}\npath: ylecun/mnist\n"
        "train: {files: [a.csv, b.csv], format: csv}\nother: ${root}/other\n"
    )
    options = ["data=mine", "paths=mine"]
    monkeypatch.chdir(root)
    cfg = compose(Project.find(), options)
    assert (cfg.data["root"], cfg.data["train"]["files"], cfg.data["other"]) == (
        "data/",
        ["a.csv", "b.csv"],
        f"{root}/other",
    )
    (root / "src").mkdir(exist_ok=True)
    monkeypatch.chdir(root / "src")
    cfg = compose(Project.find(), options)
    assert cfg.get("paths")["more"] == [str(root / "a"), "/b", "s3://c"]
    assert (cfg.get("paths")["cache"], cfg.get("paths")["output"]) == ("~/cache", f"{root}/data/out")
    assert (cfg.data["root"], cfg.data["path"]) == (f"{root}/data/", "ylecun/mnist")  # the name of a dataset
    assert cfg.data["train"] == {"files": [str(root / "a.csv"), str(root / "b.csv")], "format": "csv"}
    cfg = compose(Project.find(), [*options, "paths.data_dir=../x", "data.train={files: [y]}", "data.other=${root}/z"])
    assert (cfg.data["root"], cfg.data["train"]["files"], cfg.data["other"]) == ("../x", ["y"], f"{root}/z")


def test_an_option_cannot_inherit_from_itself(root: Path) -> None:
    (root / "configs" / "model" / "tiny.yaml").write_text("# Tiny.\ndefaults: tiny\n")
    with pytest.raises(ConfigError, match="tiny"):
        compose(Project.find(root), ["model=tiny"])
    (root / "configs" / "model" / "tiny.yaml").write_text("# Tiny.\ndefaults: mlp\n")
    (root / "configs" / "model" / "mlp.yaml").write_text("# MLP.\ndefaults: tiny\n")
    with pytest.raises(ConfigError, match="inherits from itself"):
        compose(Project.find(root), ["model=tiny"])


def test_modules_of_the_project_come_before_installed_ones(root: Path) -> None:
    code = "import sys; from boltcutter.project import Project; Project.find(sys.argv[1]).activate()"
    code += "; import small; print(small.__file__)"
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(root / "src" / "small" / "__init__.py")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("tokenizers", "pip install 'boltcutter[text]'"),
        ("prometheus_client", "pip install 'boltcutter[serve]'"),
        ("torch", "pip install torch"),
        ("cv2", "pip install opencv-python"),
        ("sklearn", "pip install scikit-learn"),
        ("yaml", "pip install PyYAML"),
        ("PIL", "pip install 'boltcutter[images]'"),
        ("no_such_package", "install the distribution that has no_such_package"),
    ],
)
def test_a_missing_module_is_installed_with_its_extra(module: str, command: str) -> None:
    assert install_command(module) == command


def test_paths_in_the_working_directory_are_shown_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "runs" / "a") == "runs/a"
    assert display_path(tmp_path.parent / "b") == str(tmp_path.parent / "b")


def test_commands_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["resume=runs/a b[1]", "trainer.max_epochs=3"]
    monkeypatch.setattr("sys.argv", ["boltcutter"])
    assert shlex.split(command("train", *arguments)) == ["boltcutter", "train", *arguments]
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "evaluate.py").touch()
    monkeypatch.setattr("sys.argv", [f"{folder}/train.py"])
    assert shlex.split(command("evaluate", "run=x[0]")) == ["python", f"{folder}/evaluate.py", "run=x[0]"]


def test_variables_of_the_project_are_set_and_never_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text('PLACE_OF_DATA="/mnt/secret place"\nexport ALREADY_SET=theirs\n')
    monkeypatch.setenv("ALREADY_SET", "mine-from-outside")
    monkeypatch.setenv("PLACE_OF_DATA", "")
    monkeypatch.delenv("PLACE_OF_DATA")
    monkeypatch.setattr("boltcutter.project.private_variables", private := set[str]())
    monkeypatch.setattr(redaction, "private_variables", private)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Project.at(tmp_path).activate()
    assert os.environ["ALREADY_SET"] == "mine-from-outside"
    assert os.environ["PLACE_OF_DATA"] == "/mnt/secret place"
    raw = {"path": "${oc.env:PLACE_OF_DATA}/x"}
    assert redaction.redact({"path": "/mnt/secret place/x"}, raw) == {"path": "***/x"}


def test_options_that_are_not_text_or_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """As opening the run of somebody else reads all of them, and ``--help`` their first lines."""
    folder = tmp_path / "configs" / "model"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text("# Mine.\n_target_: mine.A\n")
    (folder / "latin.yaml").write_bytes(b"# M\xfcller.\n")
    os.mkfifo(folder / "fifo.yaml")
    project = Project.at(tmp_path)
    texts = list(project.option_texts())
    assert "# Mine.\n_target_: mine.A\n" in texts
    assert not [text for text in texts if "M\xfcller" in text or "Mller" in text]
    assert project.describe_options("model")["latin"].startswith("M�ller.")
