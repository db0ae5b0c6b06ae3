"""Complete a new project: its dependency on the library, its license, a git repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | jsonify }}""")


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints, or an empty string if it fails."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def find_template(scratch: str) -> Path:
    """Return the folder of the template at the commit in use; cruft does not pass it on, so it is cloned."""
    if clone := ANSWERS.get("_repo_dir"):  # may be relative to the folder that cookiecutter was started in
        folders = [Path(os.environ.get("PWD", ".")), *Path.cwd().parents]
        return next(folder / clone for folder in folders if (folder / clone / "cookiecutter.json").is_file()).resolve()
    subprocess.run(["git", "clone", "-q", "--", ANSWERS["_template"].removeprefix("git+"), scratch], check=True)
    subprocess.run(["git", "-C", scratch, "checkout", "-q", ANSWERS["_commit"]], check=True)
    return Path(scratch)


def as_requirement(template: Path, source: str, commit: str) -> str:
    """Return the requirement of the library: the release that is used, or else the repository at the commit."""
    is_installed = not (template / "pyproject.toml").exists()  # the template of a wheel
    library = metadata.distribution("boltcutter") if is_installed else None
    names = [library.version] if library else git(template, "tag", "--points-at", "HEAD").split()
    for release in filter(None, (re.fullmatch(r"v?(\d+(\.\d+)+((a|b|rc)\d+)?)", name) for name in names)):
        return f"boltcutter>={release[1]}"
    if not commit:
        origin = json.loads(library.read_text("direct_url.json") or "{}") if library else {"url": template.as_uri()}
        return f"boltcutter @ {origin['url']}"
    url = re.sub(r"^([\w.-]+@[\w.-]+):(?!//)", r"ssh://\1/", source)
    url = url if "://" in url else (template / url).resolve().as_uri()
    url = url.replace("file:///", "file://localhost/")  # pip before 24 refuses a URL without a host
    return f"boltcutter @ git+{re.sub('//[^/@]*:[^/@]*@', '//', url)}@{commit}"  # without a password


def library_packages(template: Path) -> list[Path]:
    """Return the folders of the library that the template is part of."""
    folder = template / "src" if (template / "src").is_dir() else template.parents[1]
    return [file.parent for file in folder.glob("boltcutter*/__init__.py")]


def main(template: Path) -> None:
    """Complete the project in the working directory."""
    commit = git(template, "rev-parse", "HEAD") if (template / ".git").exists() else ""
    is_pushed = commit and git(template, "branch", "-r", "--contains", "HEAD")
    source = (is_pushed and git(template, "config", "remote.origin.url")) or str(template)
    if (file := template / "origin.json").is_file():  # of a wheel that a workflow has built
        origin = json.loads(file.read_text())
        source, commit = origin["template"], origin["commit"]
    file, requirement = Path("pyproject.toml"), as_requirement(template, source, commit)
    if "file://" in requirement:
        print(
            f"warning: {requirement}: exists on this machine only, so CI, `docker build` and other machines cannot "
            "install the project; push the template's commit and create the project again, or change pyproject.toml",
            file=sys.stderr,
        )
    text = file.read_text().replace('"boltcutter"', json.dumps(requirement, ensure_ascii=False), 1)
    if ANSWERS["license"] == "none":
        text = re.sub(r"^license.*\n", "", text, flags=re.M)
        Path("LICENSE").unlink()
    file.write_text(text)
    if ANSWERS["vendor"]:
        for package in library_packages(template):
            shutil.copytree(package, Path("src", package.name), ignore=shutil.ignore_patterns("__pycache__"))
    if not ANSWERS.get("_repo_dir"):
        return  # cruft writes its file itself
    if commit:
        context = {"cookiecutter": {key: value for key, value in ANSWERS.items() if not key.startswith("_")}}
        state = {"template": source, "commit": commit, "checkout": None, "directory": None, "context": context}
        Path(".cruft.json").write_text(json.dumps(state, indent=2) + "\n")
    if not git(Path.cwd(), "rev-parse", "--is-inside-work-tree"):
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Create the project"]):
            git(Path.cwd(), *command)
        if not git(Path.cwd(), "rev-parse", "--verify", "-q", "HEAD"):
            print(
                "warning: the project has no first commit, without which runs record no version of its code; set "
                "`git config --global user.name` and user.email, then: git add -A && git commit -m Begin",
                file=sys.stderr,
            )


with tempfile.TemporaryDirectory() as folder:
    main(find_template(folder))
