import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from new_project import check_style, in_shell, run, run_tests

from boltcutter.cli.commands import commands
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project, tomllib
from boltcutter.scaffold import new, vendor

ROOT = Path(__file__).parents[2]
COOKIECUTTER, CRUFT = (str(Path(sys.executable).parent / name) for name in ("cookiecutter", "cruft"))


def create(arguments: list[str]) -> Path:
    return new.new_command(Project.at(ROOT), arguments)


def as_url(folder: Path) -> str:
    return folder.as_uri().replace("file://", "file://localhost")


def requirement(project: Path) -> str:
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    return str(settings["project"]["dependencies"][0])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone without uncommitted changes; of an unpacked sdist a new repository."""
    folder = tmp_path_factory.mktemp("template") / "clone"
    if (ROOT / ".git").exists():
        run("git", "clone", "-q", str(ROOT), str(folder), cwd=ROOT)
        run("git", "remote", "remove", "origin", cwd=folder)
    else:
        shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".venv", "runs"))
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
            run("git", *command, cwd=folder)
    return folder


def files(project: Path) -> dict[str, str]:
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=project).split()
    return {name: (project / name).read_text(errors="surrogateescape") for name in names if name != ".cruft.json"}


@pytest.mark.slow
def test_a_project_is_renamed_as_documented(tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}"])
    recipe = (ROOT / "docs" / "recipes.md").read_text().partition("### Rename a project\n")[2]
    rename, install = recipe.partition("```bash\n")[2].partition("```")[0].split("pip install")
    assert install == " -e .\n"
    in_shell(rename, project)
    assert not [name for name, text in files(project).items() if re.search("my[_-]project", name + text)]
    assert "_target_: better_name.model." in in_shell("boltcutter train --print", project)


@pytest.mark.slow
def test_project_passes_its_tests(tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}", "author=Ada"])
    assert "Ada" in (project / "LICENSE").read_text()
    generated = (
        "constraints.txt",
        "AGENTS.md",
        ".vscode/",
        ".devcontainer/",
        ".pre-commit-config.yaml",
        ".env.example",
        "tests/golden/",
    )
    written = [text for name, text in files(project).items() if not name.startswith(generated)]
    assert sum(len(text.splitlines()) for text in written) <= 565  # about 500, README says
    check_style(project)
    assert "3 passed" in run_tests(project, "-k", "not as_it_was")  # which the slow tests run
    quick = ["trainer.max_steps=1", "logger=null", "report=false", "test=false"]
    run(sys.executable, "scripts/train.py", "data=digits", *quick, cwd=project)  # pixels


FORECASTER = """\
import lightning as L
import torch
from torch import nn


class Forecaster(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(1, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        past, future = batch
        self.logger.log_image("forecast", [torch.zeros(1, 2, 2)])
        self.logger.experiment.add_image("forecast", torch.zeros(1, 2, 2), self.global_step)
        return (self.head(self.net(past)[0][:, -1]) - future).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Waves(L.LightningDataModule):
    def __init__(self, steps: int = 8) -> None:
        super().__init__()
        waves = torch.sin(torch.arange(64.0)[:, None] + torch.arange(steps + 1.0))[..., None]
        self.dataset = torch.utils.data.TensorDataset(waves[:, :-1], waves[:, -1])

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.dataset, batch_size=16)

    val_dataloader = train_dataloader
"""


@pytest.mark.slow
def test_project_passes_its_tests_with_components_of_its_own(tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}"])
    for component in ("model.resnet", "model.gpt", "task.regression", "callback.guard"):
        vendor.vendor_command(Project.find(project), [component])
    (project / "src/my_project/task/forecaster.py").write_text(FORECASTER)
    for kind, name in {"task": "Forecaster", "data": "Waves"}.items():
        option = f"# Mine.\n_target_: my_project.task.forecaster.{name}\n"
        (project / f"configs/{kind}/{name.lower()}.yaml").write_text(option)
    mine = "# Mine.\ndefaults:\n  data: waves\n  task: forecaster\n"
    (project / "configs/experiment/forecast.yaml").write_text(mine)
    assert "5 passed" in run_tests(project)
    checked = run(sys.executable, "-m", "boltcutter", "check", "--batch", "experiment=forecast", cwd=project)
    assert checked == "ok\n"  # a vendored callback counts as what it is a copy of
    (project / "configs/train.yaml").write_text("# Mine.\ndefaults:\n  experiment: forecast\n")
    assert "5 passed" in run_tests(project)


def test_cookiecutter_cruft_and_new_create_the_same_project(template: Path, tmp_path: Path) -> None:
    created = create(["my-project", f"folder={tmp_path}/new", f"template={template}", "author="])
    for name, command in {
        "cookiecutter": [COOKIECUTTER, "--no-input", str(template)],
        "cruft": [CRUFT, "create", "-y", str(template)],
    }.items():
        (tmp_path / name).mkdir()
        run(*command, cwd=tmp_path / name)
        project = tmp_path / name / "my-project"
        if name == "cruft":
            run("git", "init", "-q", cwd=project)
        assert files(project) == files(created)
        assert json.loads((project / ".cruft.json").read_text())["template"] == str(template)
    assert run("git", "remote", cwd=created) == ""
    commit = run("git", "rev-parse", "HEAD", cwd=template).strip()
    assert requirement(created) == f"boltcutter @ git+{as_url(template)}@{commit}"


def test_release_is_required_at_its_tag(template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(template), str(clone), cwd=tmp_path)
    run("git", "tag", "nightly", cwd=clone)
    assert requirement(create(["a", f"folder={tmp_path}", f"template={clone}"])).startswith("boltcutter @ git+file://")
    capfd.readouterr()
    run("git", "tag", "v1.2.3", cwd=clone)
    assert requirement(create(["b", f"folder={tmp_path}", f"template={clone}"])) == "boltcutter>=1.2.3"
    assert "warning" not in capfd.readouterr().err


def test_a_requirement_that_only_this_machine_has_is_a_warning(
    template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    required = requirement(create(["a", f"folder={tmp_path}", f"template={template}"]))
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warning.startswith(f"warning: {required}: ")
    assert all(word in warning for word in ("CI", "docker build", "push", "pyproject.toml"))
    run("git", "clone", "-q", str(template), str(tmp_path / "clone"), cwd=tmp_path)
    run("git", "remote", "set-url", "origin", "https://example.com/them/library.git", cwd=tmp_path / "clone")
    create(["b", f"folder={tmp_path}", f"template={tmp_path / 'clone'}"])
    assert "warning" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("license", ["MIT", "BSD-3-Clause", "Apache-2.0", "none"])
@pytest.mark.parametrize("vendor", ["false", "true"])
def test_each_kind_of_project_passes_its_tests(vendor: str, license: str, tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}", f"license={license}", f"vendor={vendor}"])
    assert "4 passed" in run_tests(project)


def test_template_is_what_the_library_was_installed_from(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new.find_template() == (str(ROOT), None)  # a clone itself
    monkeypatch.setattr(new, "__file__", str(tmp_path / "lib" / "site-packages" / "boltcutter.scaffold" / "new.py"))
    metadata = tmp_path / "boltcutter-1.2.dev3+gabc.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: boltcutter\nVersion: 1.2.dev3+gabc\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"1\.2\.dev3\+gabc.*template="):
        new.find_template()
    (metadata / "METADATA").write_text("Name: boltcutter\nVersion: 1.2\n")
    assert new.find_template() == (str(new.BUNDLE), None)
    commit = run("git", "rev-parse", "HEAD", cwd=template).strip()
    origin = {"url": template.as_uri(), "vcs_info": {"vcs": "git", "commit_id": commit}}
    (metadata / "direct_url.json").write_text(json.dumps(origin))
    assert new.find_template() == (f"git+{template.as_uri()}", commit)
    (metadata / "direct_url.json").write_text(json.dumps({"url": template.as_uri(), "dir_info": {}}))
    assert new.find_template() == (str(template), None)


def test_origin_is_required_where_it_has_the_commit(template: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(template), str(clone), cwd=tmp_path)
    run("git", "remote", "set-url", "origin", "https://user:password@example.com/them/library.git", cwd=clone)
    project = create(["a", f"folder={tmp_path}", f"template={clone}"])
    required = requirement(project)
    assert json.loads((project / ".cruft.json").read_text())["template"].startswith("https://")
    assert required.startswith("boltcutter @ git+https://example.com/them/library.git@")
    run("git", "commit", "-q", "--allow-empty", "-m", "Not pushed", cwd=clone)
    assert requirement(create(["b", f"folder={tmp_path}", f"template={clone}"])).startswith(
        f"boltcutter @ git+{as_url(clone)}@"
    )


@pytest.mark.slow
def test_answers_are_changed_by_an_update_in_a_subfolder_of_a_repository(template: Path, tmp_path: Path) -> None:
    run("git", "init", "-q", cwd=tmp_path)
    project = create(["my-project", f"folder={tmp_path}", f"template={template}"])
    assert not (project / ".git").exists()
    run("git", "add", "-A", cwd=tmp_path)
    run("git", "commit", "-qm", "Begin", cwd=tmp_path)
    run(CRUFT, "check", cwd=project)
    assert "4 passed" in run_tests(project)
    run(CRUFT, "update", "-y", "--variables-to-update", '{"license": "BSD-3-Clause", "author": "Eve"}', cwd=project)
    assert (project / "LICENSE").read_text().startswith("BSD 3-Clause License\n\nCopyright (c) Eve\n")


@pytest.mark.parametrize("license", ["none", "Apache-2.0"])
def test_license(license: str, tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}", f"license={license}"])
    assert (project / "LICENSE").exists() == (license != "none")
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert settings.get("license", "none") == license


@pytest.mark.parametrize("arguments", [[], ["My Project"], ["torch"], ["json"], ["a", "b"], ["a", "lisense=MIT"]])
def test_mistakes(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        create([*arguments, f"folder={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("license=GPL", r"^license=GPL: .*'MIT'.*; give another value$"),
        ("--yes", r"^--yes: no such flag; write `boltcutter new"),
        ("vendor=maybe", r"^vendor=maybe: .* boolean; give another value$"),
        ("author={{ cycler.__init__.__globals__.os.mkdir('touched') }}", r"^author=.*: has control characters, {{"),
        ("author={% raw %}", r"^author=.*leave them out$"),
        ("author=a\x1b[31m", r"^author=.*leave them out$"),
        ("author=a\nb", r"^author=.*leave them out$"),
    ],
)
def test_wrong_answers_are_named(argument: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        create(["a", argument, f"folder={tmp_path}"])


@pytest.mark.parametrize(
    "author",
    [
        '"""+__import__(\'os\').mkdir(\'touched\')+r"""',
        "''' }]\\n[tool.other]",
        'O\'Brien "Bob" \\',
        "$(mkdir touched) `mkdir touched`",
        "é 漢字 \U0001f600",
    ],
)
def test_no_answer_is_executed_or_ends_the_text_around_it(
    author: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project = create(["a", f"author={author}"])
    found = tomllib.loads((project / "pyproject.toml").read_text())
    assert found["project"]["authors"] == [{"name": author}]
    assert author in (project / "LICENSE").read_text()
    assert not list(tmp_path.rglob("touched"))


def test_versions_of_a_project_are_tested_versions() -> None:
    pinned = (ROOT / "{{cookiecutter.project_slug}}" / "constraints.txt").read_text()
    assert pinned == (ROOT / "constraints.txt").read_text()


def test_modules_of_a_project_can_be_imported() -> None:
    sources = (ROOT / "{{cookiecutter.project_slug}}" / "src").rglob("*.py")
    assert {name for source in sources for name in runpy.run_path(str(source))} >= {
        "SmallMLP",
        "BreastCancer",
        "FocalClassification",
    }


@pytest.mark.slow
def test_two_updates_bring_the_changes_of_the_template_and_keep_ones_own(template: Path, tmp_path: Path) -> None:
    """The second update meets a line that both have changed: cruft leaves it to the researcher, as git does."""
    source = tmp_path / "template"
    run("git", "clone", "-q", str(template), str(source), cwd=tmp_path)
    run("git", "remote", "remove", "origin", cwd=source)
    project = create(["my-project", f"folder={tmp_path}", f"template={source}"])

    def commit(folder: Path, message: str) -> None:
        run("git", "add", "-A", cwd=folder)
        run("git", "commit", "-qm", message, cwd=folder)

    own = project / "src" / "my_project" / "model" / "tiny.py"
    own.write_text("from torch import nn\n\n\nclass Tiny(nn.Linear):\n    pass\n")
    experiment = next((project / "configs" / "experiment").glob("*.yaml"))
    experiment.write_text(experiment.read_text() + "test: true  # mine\n")
    commit(project, "My work")

    inside = source / "{{cookiecutter.project_slug}}"
    (inside / "NOTES.md").write_text("# {{ cookiecutter.project_slug }}\n")
    readme = (inside / "README.md").read_text()
    (inside / "README.md").write_text(readme + "\nNew in the first version.\n")
    commit(source, "First version")
    run(CRUFT, "update", "-y", cwd=project)
    assert (project / "NOTES.md").read_text() == "# my-project\n"
    assert (project / "README.md").read_text().endswith("\nNew in the first version.\n")
    commit(project, "First update")

    (inside / "NOTES.md").unlink()
    theirs = inside / experiment.relative_to(project)
    theirs.write_text(theirs.read_text() + "test: false\n")
    (inside / "README.md").write_text(readme + "\nNew in the second version.\n")
    commit(source, "Second version")
    run(CRUFT, "update", "-y", cwd=project)
    assert not (project / "NOTES.md").exists()
    assert (project / "README.md").read_text().endswith("\nNew in the second version.\n")
    assert own.is_file()
    conflict = "<<<<<<< ours\ntest: true  # mine\n=======\ntest: false\n>>>>>>> theirs\n"
    assert experiment.read_text().endswith(conflict)
    experiment.write_text(experiment.read_text().replace(conflict, "test: true  # mine\n"))
    run(CRUFT, "check", cwd=project)
    assert requirement(project).endswith(run("git", "rev-parse", "HEAD", cwd=source).strip())
    commit(project, "Second update")
    assert "4 passed" in run_tests(project)


def test_settings_of_editors_name_what_is_there(tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}"])
    settings = [
        json.loads(file.read_text()) for folder in (".vscode", ".devcontainer") for file in (project / folder).iterdir()
    ]
    assert len(settings) == 4
    text = json.dumps(settings)
    assert all((project / name).is_file() for name in re.findall(r"scripts/\w+\.py", text))
    assert {*re.findall(r"boltcutter (\w+)", text)} <= commands().keys()
    assert {*re.findall(r"debug=(\w+)", text)} <= Project.find(project).groups()["debug"].keys()
    hooks = yaml.safe_load((project / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    installed = (project / "pyproject.toml").read_text()
    assert all(hook["entry"].split()[0] in installed for hook in hooks)


def test_secrets_are_ignored(tmp_path: Path) -> None:
    project = create(["my-project", f"folder={tmp_path}"])
    assert (project / ".env.example").is_file()
    shutil.copy(project / ".env.example", project / ".env")
    for name in ("server.pem", "configs/local.yaml"):
        (project / name).touch()
    assert run("git", "status", "--porcelain", cwd=project) == ""
