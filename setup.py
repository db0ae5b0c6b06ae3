"""What pyproject.toml cannot say: the template in the wheel, a link in the sdist, and links on package indexes."""

import json
import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
TEMPLATE = ("cookiecutter.json", "hooks", "templates", "{{cookiecutter.project_slug}}")
CONFIGS = Path("src", "boltcutter", "configs")  # a link to configs


def repository() -> dict[str, str]:
    """The URL of the repository, and that of its files, where the build knows them: in GitHub Actions."""
    server, name, ref = (os.environ.get(f"GITHUB_{key}") for key in ("SERVER_URL", "REPOSITORY", "REF_NAME"))
    if not (server and name and ref):
        return {}
    return {"url": f"{server}/{name}", "files": f"{server}/{name}/blob/{ref}"}


def readme() -> str:
    """README with absolute links, as package indexes show it without the files beside it."""
    text = (ROOT / "README.md").read_text()
    files = repository().get("files")
    if not files:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{files.replace('/blob/', '/raw/', 1)}/", text)  # pictures
    return re.sub(r"(?<=\]\()(?!https?:|#)(?=[^)]+\))", f"{files}/", text)


class BuildWithTemplate(build_py):
    """Copies the template into the wheel, for `boltcutter new`."""

    def run(self) -> None:
        """Build, and copy; an editable installation finds the template in the repository."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "boltcutter", "scaffold", "template")
        for name in TEMPLATE:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
                shutil.copytree(ROOT / name, target / name, ignore=ignored, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        if repository():
            origin = {"template": repository()["url"], "commit": os.environ["GITHUB_SHA"]}
            (target / "origin.json").write_text(json.dumps(origin))


class SdistWithLink(sdist):
    """Keeps `src/boltcutter/configs` a link, so that the sdist is a project as the repository is."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Replace the copied folder by the link."""
        super().make_release_tree(base_dir, files)
        shutil.rmtree(Path(base_dir, CONFIGS))
        Path(base_dir, CONFIGS).symlink_to("../../configs", target_is_directory=True)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": repository()["url"]} if repository() else {},
    cmdclass={"build_py": BuildWithTemplate, "sdist": SdistWithLink},
)
