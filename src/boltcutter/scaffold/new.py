"""Create a project from the template with cookiecutter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from boltcutter.config import ConfigError, hint
from boltcutter.project import Project

USAGE = "boltcutter new my-project [folder=.] [author=<name>] [license=MIT] [vendor=false] [template=<URL or folder>]"
OPTIONS = re.findall(r"(\w+)=", USAGE)
RESERVED = {"boltcutter", "lightning", "torch", "torchmetrics", "wandb", "numpy", "src", "tests", "configs", "scripts"}


def main(project: Project, arguments: list[str]) -> None:
    """Create a project and print where it is; the current project does not matter."""
    folder = create(arguments)
    print(f"Created {folder}. Its README.md begins with the commands to install, train and test it.")


def create(arguments: list[str]) -> Path:
    """Create ``<folder>/<name>`` from the template that the library was installed from.

    Args:
        arguments: The name, then answers to the template's questions, ``folder`` and ``template``.

    Raises:
        ConfigError: An argument is wrong, cookiecutter is not installed, or the template cannot be found.
    """
    name = next((argument for argument in arguments if "=" not in argument), None)
    answers = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if name is None or len(arguments) != 1 + len(answers):
        raise ConfigError(f"new: expected one name; usage: {USAGE}")
    check_name(name)
    if unknown := answers.keys() - OPTIONS:
        name = min(unknown)
        raise ConfigError(f"{name}: no such argument{hint(name, OPTIONS)}; usage: {USAGE}")
    try:
        from cookiecutter.exceptions import CookiecutterException
        from cookiecutter.main import cookiecutter
    except ImportError:
        raise ConfigError("new: cookiecutter is not installed; run `pip install cookiecutter`") from None
    folder, template = Path(answers.pop("folder", ".")), answers.pop("template", None)
    answers.setdefault("author", _git("config", "user.name"))
    if (folder / name).exists():
        raise ConfigError(f"folder={folder}: {folder / name} exists already; choose another name or folder")
    with tempfile.TemporaryDirectory() as scratch:
        source = template_folder(template, Path(scratch))
        context = {"project_slug": name, **answers}
        try:
            cookiecutter(str(source), no_input=True, extra_context=context, output_dir=str(folder))
        except (CookiecutterException, ValueError) as error:
            raise ConfigError(f"new: the template could not be rendered: {error}") from error
    return folder / name


def check_name(name: str) -> None:
    """Refuse names that cannot be both a distribution and a package.

    Raises:
        ConfigError: The name is invalid or taken.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(f"new: {name}: a name consists of lower-case words joined by hyphens; try my-project")
    if package in sys.stdlib_module_names or package in RESERVED:
        raise ConfigError(f"new: {name}: there is another package {package}; try {name}-project")


def template_folder(template: str | None, scratch: Path) -> Path:
    """Return a folder with the template, cloned into ``scratch`` if it is a URL.

    By default it is where the library was installed from: a clone, or a repository at a commit.

    Raises:
        ConfigError: There is no template.
    """
    commit = None
    if template is None:
        clone = Path(__file__).resolve().parents[3]
        template, commit = (str(clone), None) if (clone / "cookiecutter.json").is_file() else _installed_from()
    if template is None:
        raise ConfigError("template: the library was not installed from a repository; give template=<URL or folder>")
    local = Path(template.removeprefix("git+").removeprefix("file://"))
    if commit is None and (local / "cookiecutter.json").is_file():
        return local.resolve()
    clone = scratch / "template"
    if subprocess.run(["git", "clone", "-q", "--", template.removeprefix("git+"), str(clone)]).returncode:
        raise ConfigError(f"template={template}: could not be cloned; give a URL or folder that git can clone")
    subprocess.run(["git", "-C", str(clone), "checkout", "-q", commit or "HEAD"], check=True)
    return clone


def _installed_from() -> tuple[str | None, str | None]:
    """URL and commit that pip recorded when it installed the library."""
    try:
        record = json.loads(distribution("boltcutter").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None, None
    return record.get("url"), record.get("vcs_info", {}).get("commit_id")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.strip()
