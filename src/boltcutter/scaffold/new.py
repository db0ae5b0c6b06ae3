"""Create a project from the template with cookiecutter."""

from __future__ import annotations

import json
import logging
import re
from importlib.metadata import distributions
from pathlib import Path
from subprocess import SubprocessError

from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.project import Project

BUNDLE = Path(__file__).parent / "template"  # in a wheel
OPTIONS = ("folder", "author", "license", "vendor", "template")


def new_command(project: Project, arguments: list[str]) -> Path:
    """Create a project from the template that the library was installed from, and return its folder.

    Args:
        project: Project of the working directory, which has no effect.
        arguments: The name, then answers to the template's questions, ``folder`` and ``template``.

    Raises:
        ConfigError: An argument is wrong, cookiecutter is not installed, or the template cannot be found.
    """
    names = [argument for argument in arguments if "=" not in argument]
    answers = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if flags := [name for name in names if name.startswith("-")]:
        raise ConfigError(f"{flags[0]}: no such flag; write `boltcutter new my-project`", kind="unknown_flag")
    if len(names) != 1:
        raise ConfigError("name: missing, or more than one; write `boltcutter new my-project`", kind="missing_value")
    if unknown := sorted(answers.keys() - OPTIONS):
        near = hint(unknown[0], OPTIONS)
        raise ConfigError(f"{unknown[0]}: no such argument{near} (there are: {', '.join(OPTIONS)})", kind="unknown_key")
    for name, text in ("name", names[0]), *answers.items():
        if not text.isprintable() or re.search(r"\{[{%#]", text):  # cookiecutter would execute it
            raise ConfigError(f"{name}={text}: has control characters, {{{{, {{% or {{#; leave them out")
    try:
        from cookiecutter.exceptions import CookiecutterException
        from cookiecutter.main import cookiecutter
    except ImportError:
        raise ConfigError(
            "new: cookiecutter is not installed; run `pip install cookiecutter`", kind="not_installed"
        ) from None
    folder = Path(answers.pop("folder", "."))
    template, commit = find_template(answers.pop("template", None))
    context = {**answers, "project_slug": names[0]}
    logging.getLogger("cookiecutter").setLevel(logging.CRITICAL)  # it logs tracebacks of what is raised below
    try:
        cookiecutter(template, checkout=commit, no_input=True, extra_context=context, output_dir=str(folder))
    except (CookiecutterException, OSError, SubprocessError, ValueError) as error:
        text = one_line(error).replace("Hook script failed (exit status: 1)", "refused, as the line before says")
        if wrong := re.match(r"(.*) provided for (?:choice )?variable (\w+),? (?:but )?(.*?)\.*$", text):
            raise ConfigError(f"{wrong[2]}={wrong[1]}: {wrong[3]}; give another value") from error
        raise ConfigError(f"new {names[0]}: {text}; give another name or template") from error
    print(f"Created {folder / names[0]}. Its README.md begins with the commands to install, train and test it.")
    return folder / names[0]


def find_template(template: str | None = None) -> tuple[str, str | None]:
    """Return folder or URL, and commit, of the template: by default, of what the library was installed from.

    Raises:
        ConfigError: A new project could not require the installed library, as its origin is not known.
    """
    clone = Path(__file__).resolve().parents[3]
    if template or (clone / "cookiecutter.json").is_file():
        return template or str(clone), None
    installed = next(iter(distributions(name="boltcutter")), None)
    origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    if "vcs_info" in origin:
        return f"git+{origin['url']}", origin["vcs_info"]["commit_id"]
    if "dir_info" in origin:
        return origin["url"].removeprefix("file://"), None
    version = installed.version if installed else "0+unknown"
    if not (origin or (BUNDLE / "origin.json").is_file() or re.fullmatch(r"[0-9.]+((a|b|rc)[0-9]+)?", version)):
        raise ConfigError(
            f"template: boltcutter {version}, which is installed, is neither a release nor of a known repository, so a "
            "project cannot require it; set template=<URL or folder>"
        )
    return str(BUNDLE), None
