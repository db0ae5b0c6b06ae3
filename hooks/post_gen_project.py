"""Complete a new project: its dependency on the library, its license, a git repository."""

import json
import os
import re
import shutil
import subprocess
import tempfile
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
    """Return the requirement of the library: the release that is checked out, or else the repository at the commit."""
    version = re.search(r'^version = "(.+)"', (template / "pyproject.toml").read_text(), re.M)[1]
    if not commit:
        return f"boltcutter @ {template.as_uri()}"
    if {version, f"v{version}"} & set(git(template, "tag", "--points-at", "HEAD").split()):
        return f"boltcutter>={version}"
    url = re.sub(r"^([\w.-]+@[\w.-]+):(?!//)", r"ssh://\1/", source)
    url = url if "://" in url else (template / url).resolve().as_uri()
    url = url.replace("file:///", "file://localhost/")  # pip before 24 refuses a URL without a host
    return f"boltcutter @ git+{re.sub('//[^/@]*:[^/@]*@', '//', url)}@{commit}"  # without a password


def main(template: Path) -> None:
    """Complete the project in the working directory."""
    commit = git(template, "rev-parse", "HEAD") if (template / ".git").exists() else ""
    is_pushed = commit and git(template, "branch", "-r", "--contains", "HEAD")
    source = (is_pushed and git(template, "config", "remote.origin.url")) or str(template)
    file = Path("pyproject.toml")
    text = file.read_text().replace('"boltcutter"', json.dumps(as_requirement(template, source, commit)), 1)
    if ANSWERS["license"] == "none":
        text = re.sub(r"^license.*\n", "", text, flags=re.M)
        Path("LICENSE").unlink()
    file.write_text(text)
    if ANSWERS["vendor"]:
        shutil.copytree(template / "src" / "boltcutter", "src/boltcutter", ignore=shutil.ignore_patterns("__pycache__"))
    if not ANSWERS.get("_repo_dir"):
        return  # cruft writes its file itself
    if commit:
        context = {"cookiecutter": {key: value for key, value in ANSWERS.items() if not key.startswith("_")}}
        state = {"template": source, "commit": commit, "checkout": None, "directory": None, "context": context}
        Path(".cruft.json").write_text(json.dumps(state, indent=2) + "\n")
    if not git(Path.cwd(), "rev-parse", "--is-inside-work-tree"):
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Create the project"]):
            git(Path.cwd(), *command)


with tempfile.TemporaryDirectory() as folder:
    main(find_template(folder))
