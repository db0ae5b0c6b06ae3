"""Complete a new project: its dependency on the library, its license, a git repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | jsonify }}""")
GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints, or an empty string if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, env=env)
    return done.stdout.strip() if done.returncode == 0 else ""


def find_template(scratch: str) -> Path:
    """Return the folder of the template at the commit in use; cruft does not pass it on, so it is cloned."""
    if clone := ANSWERS.get("_repo_dir"):  # may be relative to the folder that cookiecutter was started in
        folders = [Path(os.environ.get("PWD", ".")), *Path.cwd().parents]
        return next(folder / clone for folder in folders if (folder / clone / "cookiecutter.json").is_file()).resolve()
    subprocess.run(["git", "clone", "-q", "--", ANSWERS["_template"].removeprefix("git+"), scratch], check=True)
    subprocess.run(["git", "-C", scratch, "checkout", "-q", ANSWERS.get("_commit") or "HEAD"], check=True)
    return Path(scratch)


def as_requirement(template: Path) -> str:
    """Return the requirement of the library: the release that is checked out, or else the repository at the commit."""
    version = re.search(r'^version = "(.+)"', (template / "pyproject.toml").read_text(), re.M)[1]
    commit = git(template, "rev-parse", "HEAD") if (template / ".git").exists() else ""
    if not commit:
        return f"boltcutter @ {template.as_uri()}"
    if {version, f"v{version}"} & set(git(template, "tag", "--points-at", "HEAD").split()):
        return f"boltcutter>={version}"
    url = git(template, "config", "remote.origin.url") if git(template, "branch", "-r", "--contains", "HEAD") else ""
    url = url or str(template)
    if scp := re.fullmatch(r"([\w.-]+@[\w.-]+):(?!//)(.+)", url):
        url = f"ssh://{scp[1]}/{scp[2]}"
    if "://" not in url:
        url = (template / url).resolve().as_uri()
    url = url.replace("file:///", "file://localhost/")  # pip before 24 refuses a URL without a host
    return f"boltcutter @ git+{re.sub('//[^/@]*:[^/@]*@', '//', url)}@{commit}"  # without a password


def main(template: Path) -> None:
    """Complete the project in the working directory."""
    file = Path("pyproject.toml")
    text = file.read_text().replace('"boltcutter"', json.dumps(as_requirement(template)), 1)
    if ANSWERS["license"] == "none":
        text = re.sub(r"^license.*\n", "", text, flags=re.M)
        Path("LICENSE").unlink()
    file.write_text(text)
    if ANSWERS["vendor"]:
        shutil.copytree(template / "src" / "boltcutter", "src/boltcutter", ignore=shutil.ignore_patterns("__pycache__"))
    commit = git(template, "rev-parse", "HEAD")
    if ANSWERS.get("_repo_dir") and commit:  # cruft writes this file itself
        source = git(template, "config", "remote.origin.url") or str(template)
        context = {key: value for key, value in ANSWERS.items() if key not in ("_repo_dir", "_output_dir", "_checkout")}
        state = {"template": source, "commit": commit, "checkout": None}
        state |= {"context": {"cookiecutter": context | {"_template": source}}, "directory": None}
        Path(".cruft.json").write_text(json.dumps(state, indent=2) + "\n")
        if not git(Path.cwd(), "rev-parse", "--is-inside-work-tree"):
            git(Path.cwd(), "init", "-q")
            git(Path.cwd(), "add", "-A")
            git(Path.cwd(), "commit", "-qm", "Create the project")


with tempfile.TemporaryDirectory() as folder:
    sys.exit(main(Path(find_template(folder))))
