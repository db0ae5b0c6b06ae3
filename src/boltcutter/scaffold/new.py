"""Create a project from the template with cookiecutter."""

from __future__ import annotations

import json
import logging
import subprocess
from importlib.metadata import distribution
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import Project

OPTIONS = ("folder", "author", "license", "vendor", "template")


def main(project: Project, arguments: list[str]) -> None:
    """Create a project and print where it is; the current project does not matter."""
    print(f"Created {create(arguments)}. Its README.md begins with the commands to install, train and test it.")


def create(arguments: list[str]) -> Path:
    """Create ``<folder>/<name>`` from the template that the library was installed from.

    Args:
        arguments: The name, then answers to the template's questions, ``folder`` and ``template``.

    Raises:
        ConfigError: An argument is wrong, cookiecutter is not installed, or the template cannot be found.
    """
    names = [argument for argument in arguments if "=" not in argument]
    answers = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if len(names) != 1:
        raise ConfigError("new: expected one name, as in `boltcutter new my-project`")
    if unknown := sorted(answers.keys() - OPTIONS):
        raise ConfigError(
            f"{unknown[0]}: no such argument{hint(unknown[0], OPTIONS)} (there are: {', '.join(OPTIONS)})"
        )
    try:
        from cookiecutter.exceptions import CookiecutterException
        from cookiecutter.main import cookiecutter
    except ImportError:
        raise ConfigError("new: cookiecutter is not installed; run `pip install cookiecutter`") from None
    folder = Path(answers.pop("folder", "."))
    template, commit = find_template(answers.pop("template", None))
    author = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True).stdout.strip()
    context = {"author": author, **answers, "project_slug": names[0]}
    logging.getLogger("cookiecutter").setLevel(logging.CRITICAL)  # it logs tracebacks of what is raised below
    try:
        cookiecutter(template, checkout=commit, no_input=True, extra_context=context, output_dir=str(folder))
    except (CookiecutterException, ValueError) as error:
        raise ConfigError(f"new {names[0]}: {' '.join(str(error).split())}; try another name or template=") from error
    return folder / names[0]


def find_template(template: str | None = None) -> tuple[str, str | None]:
    """Return folder or URL, and commit, of the template: by default, what the library was installed from.

    Raises:
        ConfigError: The library was installed from a package index, or copied into a project.
    """
    clone = Path(__file__).resolve().parents[3]
    if template or (clone / "cookiecutter.json").is_file():
        return template or str(clone), None
    record = json.loads(distribution("boltcutter").read_text("direct_url.json") or "{}")
    if commit := record.get("vcs_info", {}).get("commit_id"):
        return f"git+{record['url']}", commit
    if "url" not in record:
        raise ConfigError("template: the library was not installed from a repository; give template=<URL or folder>")
    return record["url"].removeprefix("file://"), None
