"""A project that is cut from this one is whole under its own name, and takes in what the template learns later."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
from project.names import OWN, rename, taken  # noqa: E402
from project.rooms import MINIMAL, ROOMS  # noqa: E402

LONG = "a-name-of-20-letters"
NEW = ["scripts/new.py"]
Make = Callable[..., Path]


def sh(*command: str | Path, at: Path, status: int = 0, timeout: float = 150, **more: str) -> str:
    """Run without what this process or its user has set up, and give back all that was printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PYTHON", "BOLTCUTTER_"))}
    env |= {f"GIT_{who}_{what}": "tester" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_COUNT": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*", "WANDB_MODE": "offline"}
    env |= {"GIT_CONFIG_KEY_1": "protocol.file.allow", "GIT_CONFIG_VALUE_1": "always", "PYTHONPATH": "src"} | more
    done = subprocess.run(
        command, cwd=at, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def python(*words: str | Path, at: Path, status: int = 0, **more: str) -> str:
    return sh(sys.executable, *words, at=at, status=status, **more)


def save(repo: Path, message: str = "all") -> None:
    sh("git", "add", "-A", at=repo)
    sh("git", "commit", "-q", "-m", message, at=repo)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree as the only commit of a repository. Not to be changed."""
    copy = tmp_path_factory.mktemp("template") / "cutter"
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_bytes((ROOT / file).read_bytes())
    sh("git", "init", "-q", "-b", "main", at=copy)
    save(copy)
    return copy


@pytest.fixture
def make(template: Path, tmp_path: Path) -> Make:
    """A project by scripts/new.py."""

    def call(*without: str, name: str = "my-lab") -> Path:
        words = [f"--without={','.join(without)}"] if without else []
        python(*NEW, name, "--to", tmp_path / name, *words, at=template)
        return tmp_path / name

    return call


def texts(project: Path) -> Iterator[tuple[str, str]]:
    for file in sh("git", "ls-files", "-z", at=project).split("\0"):
        if file and not file.endswith((".png", ".gz")):
            yield file, (project / file).read_text()


def tracked(repo: Path, name: str) -> set[str]:
    """Paths as a project of this name has them."""
    listed = sh("git", "ls-files", "-z", at=repo).split("\0")
    return {rename(file, name) for file in listed if file and not file.startswith(MINIMAL)}


def ways_to_name(file: str, package: str) -> Iterator[str]:
    """Regular expressions for how a file can be named."""
    path = Path(file)
    yield rf"(?<![\w/.-]){re.escape(file)}(?!\w)"
    if file.startswith("src/") and path.suffix == ".py" and path.name != "__init__.py":
        module = ".".join(path.with_suffix("").parts[1:])
        yield rf"\b{module}\b"
        yield rf"\bfrom {module.rpartition('.')[0]} import (\w+, )*{path.stem}\b"
    if path.match("scripts/project/*.py"):
        yield rf"\bproject\.{path.stem}\b|\bfrom project import (\w+, )*{path.stem}\b"
    if path.match("configs/*/*.yaml"):
        yield rf"(?<![\w.]){path.parent.name}=\[?(\w+,)*{path.stem}(?![\w.])"
    if path.suffix in (".md", ".ipynb"):
        yield rf"\]\([^)]*\b{path.name}[)#]"


def check_whole(template: Path, project: Path) -> None:
    """Nothing bears the template's name, nothing names what is not there, and all is as ruff would have it."""
    name = json.loads((project / ".template.json").read_text())["name"]
    package = name.replace("-", "_")
    gone = tracked(template, name) - tracked(project, name)
    ways = {file: re.compile("|".join(ways_to_name(file, package))) for file in sorted(gone)}
    for file, text in texts(project):
        for line in text.splitlines() if OWN in text.lower() else ():
            if OWN in line.lower():
                assert (file, line.split(":")[0].strip()) == (".template.json", '"template"'), f"{file}: {line}"
        marks = re.search(r"^\s*(#|<!--) (>>>|<<<|\|\|\|) .*$", text, re.M)
        assert marks is None, f"{file}: {marks}"
        if not file.endswith("/choose.py"):  # it compares strategies, those that are not there as well
            for other, named in ways.items():
                if Path(other).stem in text:  # a quick look before the slow one
                    assert not [line for line in text.splitlines() if named.search(line)], f"{file}: {other}"
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text) if file.endswith(".md") else ():
            assert ((project / file).parent / link).exists(), f"{file}: {link}"
        for module in re.findall(rf"^ *from ({package}(?:\.\w+)*) import ", text, re.M) if file.endswith(".py") else ():
            path = project / "src" / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{file}: {module}"
    for command in (["check"], ["format", "--check"]):
        sh(Path(sys.executable).with_name("ruff"), *command, "--no-cache", at=project)


def test_the_questions_of_cookiecutter_are_the_rooms() -> None:
    asked = json.loads((ROOT / "cookiecutter.json").read_text())
    assert [key for key, value in asked.items() if value is True] == list(ROOMS)
    assert [asked["__prompts__"][key] for key in ROOMS] == [f"With {room.title}" for room in ROOMS.values()]


@pytest.mark.parametrize("room", ROOMS)
def test_a_project_without_a_room_is_whole(template: Path, make: Make, room: str) -> None:
    project = make(room)
    check_whole(template, project)
    left = tracked(project, "my-lab") - {".template.json"}
    assert left < tracked(template, "my-lab")
    assert not left & {rename(file, "my-lab") for file in ROOMS[room].files}
    assert json.loads((project / ".template.json").read_text())["without"] == [room]


@pytest.mark.parametrize(("name", "without"), [("my-lab", ()), (LONG, ())])
def test_a_project_of_any_name_is_whole(template: Path, make: Make, name: str, without: tuple[str, ...]) -> None:
    project = make(*without, name=name)
    check_whole(template, project)
    assert (project / "README.md").read_text().startswith(f"# {name.replace('-', ' ').title()}\n")
    assert f'name = "{name}"' in (project / "pyproject.toml").read_text()
    assert sh("git", "log", "--format=%s", at=project) == f"Begin {name}\n"
    assert sh("git", "status", "--porcelain", at=project) == ""
    assert not re.search("cookiecutter|hooks/|test_new|project/cut", " ".join(tracked(project, name)))


def test_a_project_without_all_rooms_trains(template: Path, make: Make) -> None:
    project = make(*ROOMS)  # `test_all_tests_of_a_project_pass` runs all of its tests, mypy among them
    check_whole(template, project)
    said = python("scripts/train.py", "trainer.max_epochs=1", "logger=csv", at=project)
    assert "test/accuracy" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("without", [(), tuple(ROOMS), *((room,) for room in ROOMS)], ids=",".join)
def test_all_tests_of_a_project_pass(make: Make, without: tuple[str, ...]) -> None:
    project = make(*without)
    assert " passed" in python("-m", "pytest", "-q", at=project, timeout=3500)


@pytest.mark.slow
def test_parts_that_are_begun_work_at_once(template: Path, make: Make) -> None:
    project = make("faults", "notebook", "bench")
    said = [python(*NEW, kind, f"own_{kind}", at=project) for kind in ("model", "data", "task", "callback", "launch")]
    assert "python scripts/train.py callback=[default,own_callback] --check; pytest tests/callback/" in said[3]
    check_whole(template, project)
    python("-m", "mypy", f"--cache-dir={ROOT}/.mypy_cache", at=project)
    tests = [f"tests/{kind}/test_own_{kind}.py" for kind in ("model", "data", "task", "callback", "launch")]
    assert " passed" in python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "tests/test_layout.py", at=project
    )
    assert "own_data: " not in python("scripts/train.py", "data=own_data", "--check", at=project)
    for words, reason in {
        "model own_model": "src/my_lab/model/own_model.py is there already",
        "model Big-Net": "lower-case words joined by underscores; try big_net",
        "model lambda": "this word means something else here; try lambda_model",
        "room x": "no such kind of part (there are: model, data, task, callback, launch)",
    }.items():
        assert reason in python(*NEW, *words.split(), at=project, status=2)
    assert "give a kind and a name" in python(*NEW, "other", at=project, status=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MyLab", "lower-case words joined by hyphens; try my-lab"),
        ("2nd", "lower-case words joined by hyphens; try nd"),
        ("class", "a word of the Python language"),
        ("json", "a module of Python's own library"),
        ("torch", "a package that the project needs"),
        ("pytest-timeout", "a package that the project needs"),
        ("sklearn", "a package that the project needs"),
        ("src", "a folder of every project"),
        ("test", "a folder of every project"),
        ("train", "scripts/train would be imported in its place"),
        ("conftest", "tests/conftest would be imported in its place"),
        (OWN, "the template's own name"),
        (f"{LONG}-and-more-letters", "make lines too long"),
    ],
)
def test_names_that_cannot_be(template: Path, tmp_path: Path, name: str, reason: str) -> None:
    said = python(*NEW, name, "--to", tmp_path / "new", at=template, status=2)
    assert said.startswith(f"error: {name}: ")
    assert reason in said
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_is_installed_is_not_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert taken("somebodys", ROOT) == f"somebodys is installed in {tmp_path}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--without=lunch"], "--without lunch: no such part (there are: launch, "),
        (["--license=GPL"], "--license GPL: no such license"),
        (["--to=scripts"], "--to scripts: there is something already"),
    ],
)
def test_choices_that_cannot_be(template: Path, tmp_path: Path, words: list[str], reason: str) -> None:
    assert reason in python(*NEW, "my-lab", f"--to={tmp_path}/new", *words, at=template, status=2)


@pytest.mark.parametrize(
    "license",
    ["MIT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("BSD-3-Clause", "Apache-2.0")), "none"],
)
def test_author_and_license(template: Path, tmp_path: Path, license: str) -> None:
    python(*NEW, "my-lab", f"--to={tmp_path}/new", '--author=Åsa "Q"', f"--license={license}", at=template)
    text = (tmp_path / "new" / "pyproject.toml").read_text()
    assert 'authors = [{ name = "Åsa \\"Q\\"" }]\n' in text
    assert (f'license = "{license}"\n' in text) == (license != "none")
    assert (tmp_path / "new" / "LICENSE").exists() == (license != "none")
    assert license == "none" or 'Åsa "Q"' in (tmp_path / "new" / "LICENSE").read_text()


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(False, id="a copy on GitHub"),
        pytest.param(True, id="a downloaded archive", marks=pytest.mark.slow),
    ],
)
def test_a_copy_becomes_the_project(template: Path, tmp_path: Path, archive: bool) -> None:
    project = tmp_path / "copy"
    sh("git", "clone", "-q", "--depth=1", f"file://{template}", project, at=tmp_path)
    sh("rm", "-rf", project / ".git", at=tmp_path)
    if not archive:
        sh("git", "init", "-q", "-b", "main", at=project)
        save(project, "Initial commit")
        (project / "README.md").write_text("")
        assert "README.md is not committed; commit your changes first" in python(*NEW, "my-lab", at=project, status=2)
        sh("git", "checkout", "-q", "README.md", at=project)
    (project / "runs").mkdir()
    (project / "runs/kept").write_text("")
    python(*NEW, "my-lab", "--without=bench", at=project)
    check_whole(template, project)
    assert not (project / "src" / OWN).exists()
    assert (project / "runs/kept").exists()
    tree = sh("git", "rev-parse", "HEAD^{tree}", at=template).strip()
    assert json.loads((project / ".template.json").read_text())["tree"] == tree
    assert "nothing new" in python(*NEW, "--update", "--from", template, at=project)


@pytest.fixture
def versions(template: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A template of one's own, and a project without launch that was cut from it."""
    sh("git", "clone", "-q", template, tmp_path / "cutter", at=tmp_path)
    python(*NEW, "my-lab", "--to", tmp_path / "my-lab", "--without=launch", at=tmp_path / "cutter")
    return tmp_path / "cutter", tmp_path / "my-lab"


def change(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def test_update(versions: tuple[Path, Path]) -> None:
    template, project = versions
    update = [*NEW, "--update", "--from", template]
    assert python(*update, at=project) == "nothing new\n"
    python(*NEW, "model", "own", at=project)
    change(project, "README.md", "## Start\n", "## Start here\n")
    change(project, "configs/model/mlp.yaml", "dropout: ", "dropout:  ")
    change(project, "configs/data/digits.yaml", "outputs: 10", "outputs: 10  # mine\nx: 1")
    sh("git", "mv", "src/my_lab/model/convnet.py", "src/my_lab/model/vision.py", at=project)
    sh("git", "rm", "-q", "configs/optimizer/adam.yaml", "configs/data/synthetic.yaml", at=project)
    assert "README.md is not committed" in python(*update, at=project, status=2)
    change(project, "src/my_lab/model/own.py", "\n\n\nclass", "\nfrom my_lab import run, summary\n\n\nclass")
    (project / "configs/experiment/own.yaml").write_text("# Mine.\ndefaults:\n  optimizer: sgd\n  model: own\n")
    save(project, "mine")

    change(template, "README.md", "\n## Data\n", "\nNews of Boltcutter.\n\n## Data\n")
    change(template, f"src/{OWN}/model/convnet.py", '"""\n\nfrom', '"""\n\n# fixed in boltcutter\nfrom')
    change(template, "configs/optimizer/adam.yaml", "_target_", "# news\n_target_")
    change(template, "configs/data/digits.yaml", "outputs: 10", "outputs: 10  # theirs\ny: 1")
    sh("git", "mv", f"src/{OWN}/summary.py", f"src/{OWN}/outline.py", at=template)
    sh("git", "mv", f"src/{OWN}/model/rescaling.py", f"src/{OWN}/model/scale.py", at=template)
    sh("git", "mv", "configs/data/synthetic.yaml", "configs/data/noise.yaml", at=template)
    sh("git", "mv", "configs/optimizer/sgd.yaml", "configs/optimizer/descent.yaml", at=template)
    sh("git", "rm", "-q", "configs/model/mlp.yaml", at=template)
    (template / f"src/{OWN}/launch/more.py").write_text('"""More."""\n')
    (template / f"src/{OWN}/model/fresh.py").write_text('"""Of boltcutter."""\n')
    save(template, "news")
    sh("git", "tag", "v2", at=template)

    before = sh("git", "ls-tree", "-r", "HEAD", at=project)
    assert "+News of My Lab." in python(*NEW, "--diff", "--from", template, at=project)
    assert sh("git", "status", "--porcelain", at=project) == ""
    said = python(*update, at=project)
    assert "configs/data/digits.yaml: the same lines, which are marked in it" in said
    assert "configs/model/mlp.yaml: the template has deleted it; yours is there" in said
    assert said.count("\n  configs/") == 2, said
    assert {"UU configs/data/digits.yaml", "A  src/my_lab/model/fresh.py"} <= set(said.splitlines())
    readme = (project / "README.md").read_text()
    assert "## Start here\n" in readme
    assert "News of My Lab." in readme
    assert "# fixed in my_lab" in (project / "src/my_lab/model/vision.py").read_text()
    assert (project / "src/my_lab/outline.py").exists()
    assert "<<<<<<<" in (project / "configs/data/digits.yaml").read_text()
    gone = ["src/my_lab/summary.py", "src/my_lab/launch", "src/my_lab/model/convnet.py"]
    gone += [f"configs/{file}.yaml" for file in ("optimizer/adam", "data/synthetic", "data/noise")]
    assert [file for file in gone if (project / file).exists()] == []
    own = (project / "src/my_lab/model/own.py").read_text()
    assert "\nfrom my_lab.model.scale import Rescaling" in own
    assert "\nfrom my_lab import run, outline as summary\n" in own
    assert "  optimizer: descent\n" in (project / "configs/experiment/own.yaml").read_text()
    assert "src/my_lab/model/own.py names what the template has renamed by its new name" in said

    assert "To undo it: git reset --hard" in said
    sh("git", "reset", "-q", "--hard", at=project)
    assert sh("git", "status", "--porcelain", at=project) == ""
    assert sh("git", "ls-tree", "-r", "HEAD", at=project) == before
    python(*update, "--version=v2", at=project)
    sh("git", "checkout", "-q", "--ours", "configs/data/digits.yaml", at=project)
    save(project, "updated")
    assert python(*update, at=project) == "nothing new\n"


def test_an_update_that_cannot_be(versions: tuple[Path, Path], tmp_path: Path) -> None:
    template, project = versions
    assert "--version v9: the template has no such version" in python(
        *NEW, "--update", "--from", template, "--version=v9", at=project, status=2
    )
    assert "say where the template is" in python(*NEW, "--update", "--from", tmp_path / "none", at=project, status=2)
    sh("git", "checkout", "-q", "--orphan", "other", at=template)
    change(template, "README.md", "## Start", "## Begin")
    save(template)
    sh("git", "branch", "-q", "-D", "main", at=template)
    said = python(*NEW, "--update", "--from", f"file://{template}", at=project, status=2)
    assert "does not have the version" in said
    (project / ".template.json").unlink()
    save(project)
    assert ".template.json is missing" in python(*NEW, "--update", at=project, status=2)


@pytest.mark.parametrize(
    "url", [pytest.param("{}", id="path"), pytest.param("git+file://{}", id="git URL", marks=pytest.mark.slow)]
)
def test_cookiecutter(template: Path, tmp_path: Path, url: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path}/clones\nreplay_dir: {tmp_path}/replay\n")
    words = ["--no-input", "--config-file", config, url.format(template)]
    python("-m", "cookiecutter", *words, "project_slug=my-lab", "author=Me", "launch=false", "bench=no", at=tmp_path)
    project = tmp_path / "my-lab"
    check_whole(template, project)
    state = json.loads((project / ".template.json").read_text())
    assert (state["without"], state["author"], state["license"]) == (["launch", "bench"], "Me", "MIT")
    assert sh("git", "status", "--porcelain", at=project) == ""
    said = python("-m", "cookiecutter", *words, "project_slug=torch", at=tmp_path, status=1)
    assert "error: torch: torch is a package that the project needs" in said
    assert not (tmp_path / "torch").exists()


@pytest.mark.slow
def test_cruft(template: Path, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    sh("git", "clone", "-q", template, tmp_path / "cutter", at=tmp_path)
    answers = json.dumps({"project_slug": "my-lab", "launch": False})
    cruft = [Path(sys.executable).with_name("cruft")]
    sh(*cruft, "create", "-y", "--extra-context", answers, tmp_path / "cutter", at=tmp_path, **home)
    project = tmp_path / "my-lab"
    assert not (project / "src/my_lab/launch").exists()
    sh("git", "init", "-q", "-b", "main", at=project)
    save(project)
    check_whole_but_cruft(template, project)
    sh(*cruft, "check", at=project, **home)
    change(tmp_path / "cutter", "README.md", "\n## Data\n", "\nNews of Boltcutter.\n\n## Data\n")
    save(tmp_path / "cutter")
    sh(*cruft, "check", at=project, status=1, **home)
    sh(*cruft, "update", "-y", at=project, **home)
    assert "News of My Lab." in (project / "README.md").read_text()
    save(project)
    sh(*cruft, "check", at=project, **home)
    assert python(*NEW, "--update", "--from", tmp_path / "cutter", at=project) == "nothing new\n"


def check_whole_but_cruft(template: Path, project: Path) -> None:
    """Cruft's own file says where the template is, too."""
    kept = (project / ".cruft.json").read_text()
    sh("git", "rm", "-q", "--cached", ".cruft.json", at=project)
    check_whole(template, project)
    (project / ".cruft.json").write_text(kept)
    sh("git", "add", ".cruft.json", at=project)
