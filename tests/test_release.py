"""What is released: versions from git, metadata, the sdist, and the wheel with the template."""

import email
import json
import re
import shutil
import sys
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from new_project import check_style, run

ROOT = Path(__file__).parents[1]
PACKAGING = ("pyproject.toml", "setup.py", "README.md", "LICENSE", ".gitattributes", ".git_archival.txt", ".gitignore")
METADATA = "from setuptools.build_meta import *; print(prepare_metadata_for_build_wheel('.'))"
GITHUB = {
    "GITHUB_SERVER_URL": "https://example.com",
    "GITHUB_REPOSITORY": "them/library",
    "GITHUB_REF_NAME": "v1.2.3",
    "GITHUB_SHA": "c" * 40,
}
QUICK = ["trainer.max_steps=1", "logger=null", "report=false", "test=false", "folder=run"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with what builds the library, and all that is installed here."""
    folder = tmp_path_factory.mktemp("builder")
    venv.create(folder, with_pip=True)
    found = str(folder / "bin" / "python")
    requires = re.search(r"requires = \[(.+)\]", (ROOT / "pyproject.toml").read_text())
    assert requires
    run(found, "-m", "pip", "install", "-q", *re.findall('"(.+?)"', requires[1]), "build", cwd=folder)
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with what the metadata depend on, and one commit."""
    folder = tmp_path / "repository"
    (folder / "src" / "boltcutter").mkdir(parents=True)
    (folder / "src" / "boltcutter" / "__init__.py").touch()
    for name in PACKAGING:
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "-q")
    commit(folder)
    return folder


def git(folder: Path, *arguments: str) -> str:
    return run("git", *arguments, cwd=folder).strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Change", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


def metadata(python: str, folder: Path, **environment: str) -> Message:
    """The metadata of the wheel that would be built."""
    removed = dict.fromkeys(GITHUB, "")
    name = run(python, "-c", METADATA, cwd=folder, **removed | environment).split()[-1]
    found = email.message_from_string((folder / name / "METADATA").read_text())
    for left in [folder / name, *folder.rglob("*.egg-info")]:
        shutil.rmtree(left)
    return found


def test_the_version_is_that_of_the_tag(python: str, repository: Path, tmp_path: Path) -> None:
    def version(folder: Path) -> str:
        return str(metadata(python, folder)["Version"])

    first = git(repository, "rev-parse", "HEAD")
    assert re.fullmatch(rf"0\.\d\.dev\d+\+g{first[:7]}\w*", version(repository))  # no tags
    git(repository, "tag", "v1.2.3")
    assert version(repository) == "1.2.3"
    git(repository, "archive", "-o", str(tmp_path / "release.tar"), "HEAD")
    latest = commit(repository)
    assert re.fullmatch(rf"1\.2\.4\.dev1\+g{latest[:7]}\w*", version(repository))
    git(repository, "archive", "-o", str(tmp_path / "later.tar"), "HEAD")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", repository.as_uri(), str(shallow))
    assert f"dev1+g{latest[:7]}" in version(shallow)
    for archive, expected in {"release": "1.2.3", "later": f"1.2.4.dev1+g{latest[:7]}"}.items():
        (tmp_path / archive).mkdir()
        shutil.unpack_archive(tmp_path / f"{archive}.tar", tmp_path / archive)
        assert version(tmp_path / archive).startswith(expected)
    # Without git, also in another repository, whose tags are not those of the library.
    git(tmp_path, "init", "-q")
    shutil.rmtree(repository / ".git")
    commit(tmp_path)
    git(tmp_path, "tag", "v9.9")
    assert version(repository) == "0.0.dev0"


def test_links_are_absolute_where_the_build_knows_the_repository(python: str, repository: Path) -> None:
    found = metadata(python, repository, **GITHUB)
    assert found.get_all("Project-URL") == ["Repository, https://example.com/them/library"]
    text = found.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "https://example.com/them/library/blob/v1.2.3/docs/launch.md" in links
    assert "https://example.com/them/library/raw/v1.2.3/docs/pictures/report.png" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    found = metadata(python, repository)
    assert "Project-URL" not in found
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert found["Author"] or found["Author-email"]
    assert len(found.get_all("Classifier")) > 5


@pytest.fixture(scope="module")
def dist(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this repository's files, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    git(copy, "init", "-q")
    commit(copy)
    run(python, "-m", "build", "--no-isolation", "-o", str(folder), cwd=copy, **dict.fromkeys(GITHUB, ""))
    return folder


def test_an_sdist_is_a_project_with_tests(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert (folder / "src" / "boltcutter" / "configs").readlink() == Path("../../configs")
    for name in ("tests/conftest.py", "scripts/train.py", "cookiecutter.json", "constraints.txt", "docs/api.md"):
        assert (folder / name).is_file()
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_project.py"]
    assert " passed" in run(sys.executable, *tests, cwd=folder, PYTHONPATH=str(folder / "src"))


def test_a_wheel_of_the_sdist_has_all_files_of_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    tracked = git(dist / "copy", "ls-files", "src/*/*", "configs").splitlines()
    assert len(tracked) > 300
    names = {re.sub("^configs/", "boltcutter/configs/", name.removeprefix("src/")) for name in tracked}
    assert names - {"boltcutter/configs"} <= set(zipfile.ZipFile(wheel).namelist())  # it is a link in the repository


def installed(folder: Path, *arguments: str) -> str:
    """An interpreter with the library by ``pip install``, and the packages that are installed here."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--no-deps", *arguments, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("*/site-packages")
    library = Path(run(python, "-c", "import boltcutter; print(boltcutter.__file__)", cwd=folder).strip())
    assert library.is_relative_to(site)
    # The packages of this environment, but not an editable installation of the library in it.
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


def test_a_release_is_installed_from_an_index(python: str, dist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index" / "boltcutter"
    git(dist / "copy", "tag", "v0.1.0")
    build = ["-m", "build", "--no-isolation", "--wheel", "-o", str(folder)]
    run(python, *build, cwd=dist / "copy", **dict.fromkeys(GITHUB, ""))
    git(dist / "copy", "tag", "-d", "v0.1.0")
    (wheel,) = folder.iterdir()
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    ours = installed(tmp_path, "--index-url", folder.parent.as_uri(), "boltcutter==0.1.0")
    assert "Created my-project" in run(ours, "-m", "boltcutter", "new", "my-project", cwd=tmp_path)
    project = tmp_path / "my-project"
    assert '"boltcutter>=0.1.0"' in (project / "pyproject.toml").read_text()
    run(ours, "scripts/train.py", *QUICK, cwd=project)
    assert json.loads((project / "run" / "record.json").read_text())["library"]["version"] == "0.1.0"


def test_the_wheel_creates_projects(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    python = installed(tmp_path, str(wheel))
    created = run(python, "-m", "boltcutter", "new", "my-project", cwd=tmp_path)
    assert "Created my-project" in created
    project = tmp_path / "my-project"
    assert f'"boltcutter @ {wheel.as_uri().replace("+", "%2B")}"' in (project / "pyproject.toml").read_text()
    assert run("git", "status", "--porcelain", cwd=project) == ""
    check_style(project)
    run(python, "scripts/train.py", *QUICK, cwd=project)
    record = json.loads((project / "run" / "record.json").read_text())
    version = run(python, "-m", "boltcutter", "--version", cwd=tmp_path).strip()
    assert version == f"boltcutter {record['library']['version']}"
    assert wheel.name.startswith(version.replace(" ", "-"))
