"""Commands, extras, files and links in Markdown files exist and are valid."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from conftest import require, run_command
from PIL import Image

from boltcutter.analysis.command import SWITCHES, VALUES, parse
from boltcutter.analysis.command import VERBS as RUN_VERBS
from boltcutter.analysis.comparison import parse_arguments as parse_comparison
from boltcutter.analysis.live import SETTINGS as LIVE
from boltcutter.analysis.query import parse as parse_filter
from boltcutter.assembly.assemble import read_config
from boltcutter.assembly.overrides import read_overrides
from boltcutter.cli.commands import commands as known_commands
from boltcutter.cli.commands import run
from boltcutter.cli.mcp_server import RUN_LIMITS
from boltcutter.cli.translate import translate
from boltcutter.config.values import split_overrides
from boltcutter.export.command import read_settings
from boltcutter.export.serving.server import LIMITS, SERVER
from boltcutter.launch.command import FLAGS, VERBS
from boltcutter.planning.flags import CHECK_FLAGS, DOCTOR_FLAGS
from boltcutter.project import Project, tomllib
from boltcutter.scaffold import new, vendor
from boltcutter.tries.question import parse_request

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
TEMPLATE_PAGES = [TEMPLATE / "README.md", TEMPLATE / "AGENTS.md"]
FIRST_PAGES = {"README.md", "index.md", "first-project.md", "configuration.md", "runs.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "data" / "README.md",
]
COMMAND = re.compile(r"(?:scripts/(\w+)\.py|boltcutter (?=[a-z]))(.*)")
PROGRAM = r"(?:eval \"\$\()?(?:GLIBC_\S+ )?(?:python |boltcutter |torchrun |mpirun |horovodrun |srun python )"
OWN_FLAGS = {"check": CHECK_FLAGS, "doctor": DOCTOR_FLAGS, "why": {"--hang"}}
OWN = {  # keys of commands besides overrides of training
    "train": {"resume", "reproduce", "ckpt"},
    "check": {"run"},
    "audit": {"run", "ckpt"},
    "doctor": {"run", "devices", "memory"},
    "evaluate": {"run", "ckpt", "split"},
    "predict": {"run", "ckpt", "input", "output", "tokens", "temperature", "top_k", "export"},
    "serve": {"run", "ckpt", "export", *SERVER, *LIMITS},
    "export": {"run", "ckpt"},
    "compare": {"run", "with", "ckpt"},
    "sync": {"run"},
    "info": {"run", "ckpt"},
    "why": {"run"},
    "bisect": {"run", "with", "timeout", "--python-a", "--python-b"},
    "golden": {"run", "name", "tolerance.loss", "tolerance.gradient_norm", "tolerance.lr"},
    "find-batch-size": set(),
    "bench": {"seconds", "work"},
}
# Documented commands that need neither files nor packages beside those of the tests.
SELF_CONTAINED = [
    "train model=mlp trainer.max_epochs=5",
    "train trainer=ddp trainer.accelerator=cpu trainer.devices=2",
    "train callback=[default,ema] optimizer=sgd optimizer.lr=0.05",
    "train callback=[default,qat] model=mlp",
    "train experiment=diabetes",
    "train debug=overfit model=mlp",
    "train debug=[fast,anomaly] experiment=diabetes",
    "train data=digits data.num_folds=5 data.fold=0",
    "train data=digits data.num_folds=5 data.fold=0 data.split=[0.9,0.1,0]",
    "check --batch model=resnet",
    "check model=mlp",
]
SETTING = re.compile(r"\+{0,2}[a-z][\w./]*=.*|~[a-z][\w.]*", re.S)
TABLE = "data=tabular data.path=table.csv data.target=label model=mlp"
CONTEXT = {  # of settings that a page gives alone: what readers have chosen before
    r"callback\.early_stopping": "callback=[default,early_stopping]",
    r"data\.(?:augment|folder)": "data=images data.folder=photos data.batch_size=4",
    r"data=images": "data.batch_size=4",
    r"data\.(?:columns|fill_missing|group|ignore|path=shuffled)": TABLE,
    r"data\.kind": "data=tabular data.path=table.csv data.target=price model=mlp",
    r"model\.hidden_sizes": "model=mlp",
    r"model\.activation_checkpointing": "experiment=gpt_small",
    r"\+?trainer\.strategy": "trainer=ddp",
    r"launch\.shm_size": "launch=container launch.image=mine",
    r"launch\.setup": "launch=slurm data=images data.num_classes=2",
    r"launch\.(?!shm_size|setup)": "launch=slurm",
}
OF_READERS = re.compile(  # settings of files, runs and accounts that only readers have, and arguments of Python
    r"\b(?:mine|my_encoder|wide)\b|\b(?:resume|ckpt|trust|key|device|drop_last|shuffle)=|data=(?:huggingface|text)|search[.=]|notes/|"
    r"data=(?:images|shards|tokens)$|data=images data\.augment"
)
MISTAKES = [["trainer.gpus=2"], ["callback.best.monitor=val/acc"]]  # of which a page shows what `check` answers
Found = tuple[str, tuple[str, ...]]
pytestmark = pytest.mark.timeout(600)  # text and digits are read, which is slow on a busy machine


def code(text: str) -> list[str]:
    """Lines of code blocks, and code spans in the text."""
    blocks = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind in ("", "bash")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans


def commands(page: Path) -> set[Found]:
    """Each command of ours on a page, with its arguments."""
    found = set()
    for part in (part for line in code(page.read_text()) for part in re.split(r" && | & |; ", line)):
        match = COMMAND.search(part)
        if match and re.match(PROGRAM, part.removeprefix(".venv/bin/")):
            script, rest = match.groups()
            arguments = shlex.split(rest.rstrip(')"') if part.startswith("eval") else rest, comments=True)
            found.add((script or arguments[0], tuple(arguments if script else arguments[1:])))
    return found


def settings(page: Path) -> list[list[str]]:
    """The settings that a page gives without a command, as the words of each code span."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    spans = sorted(
        {span for span in code(text) if re.match(r"'?[+~]?[a-z][\w.]*", span) and not re.search("[…<]", span)}
    )
    split = [shlex.split(span) for span in spans if span.count("'") % 2 == span.count('"') % 2 == 0]
    return [words for words in split if all(SETTING.fullmatch(word) for word in words)]


def check(project: Project, name: str, arguments: list[str]) -> None:
    """Parse a command as far as that is possible without running it."""
    if name == "check" and arguments[:1] == ["doctor"]:
        name, arguments = "doctor", arguments[1:]
    arguments = [argument for argument in arguments if argument not in ("…", "--json")]
    if name == "check" and arguments in MISTAKES:
        return
    if name == "train":  # which a multirun translates to a search
        name, arguments = translate(project, name, arguments)
    if name == "bench" and {argument.strip("[]").partition("=")[0] for argument in arguments} <= OWN["bench"]:
        return  # the command, not scripts/bench.py
    if name == "bench":
        benchmark = ROOT / "scripts" / "benchmarks" / f"{arguments[0]}.py"
        keys = {argument.strip("[]").partition("=")[0] for argument in arguments[1:]}
        assert all(re.search(rf"\b{key}\b", benchmark.read_text()) for key in keys), arguments
    elif name == "lightning_suite":
        words = (ROOT / "scripts" / "lightning_suite.py").read_text()
        assert all(argument.partition("=")[0] in words for argument in arguments if "=" in argument), arguments
    elif name == "launch" and arguments[0] in (*VERBS, "list"):
        assert {argument.partition("=")[0] for argument in arguments[1:]} <= {"run", *FLAGS}
    elif any(argument in ("--describe", "--print", "--check", "--help", "--completion") for argument in arguments):
        run(name, arguments, str(project.root))
    elif name in ("try", "tries"):
        if name == "try" and {"metric", "effect"} <= {argument.partition("=")[0] for argument in arguments}:
            parse_request(arguments)
    elif name == "mcp":
        assert not [a for a in arguments if a.partition("=")[0] not in RUN_LIMITS]
    elif name == "compare" and "--metric" in arguments:
        groups = parse_comparison(arguments)[3]
        assert [parse_filter(group) for group in groups if not group.startswith("runs/")]
    elif name == "runs":
        flags, rest = parse(arguments, VALUES, SWITCHES)
        rest = split_overrides(rest, *LIVE)[1] if "--live" in flags else rest
        assert rest[:1] in ([], ["latest"]) or rest[0] in RUN_VERBS or parse_filter(rest[0])
    elif name in ("launch", "search"):
        if name == "search" and any(argument.startswith("resume=") for argument in arguments):
            return
        fresh = [argument for argument in arguments if not argument.startswith(("resume=", "--"))]
        run(name, [*fresh, "--check"], str(project.root))
    else:
        if name == "export":
            read_settings(project, [argument for argument in arguments if argument.startswith("export")])
            arguments = [argument for argument in arguments if not argument.startswith("export")]
        overrides = [argument for argument in arguments if argument.partition("=")[0] not in OWN[name]]
        overrides = [override for override in overrides if override not in OWN_FLAGS.get(name, ())]
        assert not [override for override in overrides if override.startswith("-")]
        if "data=huggingface" in overrides:  # whose files are not here; sizes would be read from them
            read_overrides(project, overrides)
        elif name not in ("compare", "sync", "bisect") and overrides:
            read_config(project, overrides)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.find(new.new_command(Project.at(ROOT), ["my-project", f"folder={tmp_path_factory.mktemp('new')}"]))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in FIRST_PAGES else pytest.mark.slow)  # minutes together
        for page in PAGES
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_on_a_page_are_valid(page: Path) -> None:
    if page.name == "troubleshooting.md":  # whose commands are mistakes; see test_troubleshooting.py
        return
    if page.parent.name == "gallery":  # a project of its own; see test_examples.py
        return
    given = [argument for _, arguments in commands(page) for argument in arguments]
    if any(re.search(r"=(ray|asha|pbt)$|=ray\.", argument) for argument in given):
        require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
    for name, arguments in sorted(commands(page)):
        is_example = any("mine" in given or ".py:" in given for given in arguments)  # of files, not of overrides
        if arguments and not is_example and name not in ("new", "add", "import", "vendor"):  # those write files
            check(Project.find(ROOT), name, list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipes.md", "questions.md"])
def test_settings_on_a_page_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pandas.DataFrame({"price": range(90), "weight": range(90), "patient": [i // 2 for i in range(90)]})
    table = table.assign(zip=[f"{i % 9:05}" for i in range(90)], label=["no", "yes"] * 45)
    for file in ("table.csv", "more.csv", "shuffled.csv"):
        table.to_csv(tmp_path / file, index=False)
    table.to_parquet(tmp_path / "table.parquet")
    for index in range(40):
        file = tmp_path / "photos" / ("cat", "dog")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), index, dtype="uint8")).save(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", str(tmp_path / "photos"))
    project = Project.find(ROOT)
    found = [" ".join(map(shlex.quote, words)) for words in settings(ROOT / "docs" / name)]
    read = [words for words in found if not OF_READERS.search(words)]
    assert len(read) > 10
    for words in read:
        before = [each for pattern, each in CONTEXT.items() if re.match(f"'?{pattern}", words)]
        words = shlex.split(" ".join([*before, words]))
        if any(word.startswith("launch=") for word in words):
            check(project, "launch", words)
        else:
            read_config(project, words)


def test_commands_that_write_files_work_as_documented(project: Project) -> None:
    documented = {found for page in [*PAGES, *TEMPLATE_PAGES] for found in commands(page)}
    assert {("new", ("my-project",)), ("add", ("experiment", "wide")), ("vendor", ())} <= documented
    for name, arguments in sorted(documented - {("vendor", ())}):
        if name == "vendor" or (name == "add" and arguments):
            run(name, list(arguments), str(project.root))
    # Last and directly: a command in a project with a copy of the library restarts its process, which is pytest here.
    vendor.vendor_command(project, [])
    assert (project.root / "src" / "boltcutter" / "project.py").is_file()
    vendor.vendor_command(project, ["--undo"])


@pytest.mark.slow
def test_commands_of_a_new_project_are_valid(project: Project) -> None:
    found = {command for page in TEMPLATE_PAGES for command in commands(project.root / page.name)}
    assert ("train", ()) in found
    project.activate()
    for name, arguments in sorted(found):
        if name not in ("add", "vendor"):
            check(project, name, list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("command", SELF_CONTAINED)
def test_a_documented_command_runs(command: str, tmp_path: Path) -> None:
    name, *arguments = command.split()
    assert any((name, tuple(arguments)) in commands(page) for page in PAGES)
    elsewhere = [f"runs={tmp_path}", "logger=csv"] if name == "train" else []
    done = run_command([sys.executable, "-m", "boltcutter", name, *arguments, *elsewhere], timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bool(list(tmp_path.glob("*/*/record.json"))) == (name == "train")


@pytest.mark.parametrize("page", [*PAGES, *TEMPLATE_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_extras_and_files_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    folder = TEMPLATE if TEMPLATE in page.parents else ROOT
    settings = re.sub(r"{{.*?}}", "", (folder / "pyproject.toml").read_text())  # of a template, not filled in
    extras = tomllib.loads(settings)["project"]["optional-dependencies"]
    assert {extra for given in re.findall(r"\.\[([\w,]+)\]", text) for extra in given.split(",")} <= extras.keys()
    folders = (
        folder,
        page.parent,
        folder / "src",
        folder / "src" / "boltcutter",
        folder / "src" / "{{cookiecutter.__package}}",
    )
    named = re.findall(r"(?<![\w./-])(?:tests|configs|docs|scripts)/[\w./-]*\w", text)
    named += re.findall(r"`((?:[a-z_]+/)+[\w-]+\.(?:py|yaml|html|sh))`", text)
    examples = re.compile("tiny|mine|my_")
    ignored = (ROOT / ".gitignore").read_text().splitlines()  # files that the reader may write
    named = [name for name in named if not examples.search(name) and f"/{name}" not in ignored]
    assert not [name for name in named if not any((up / name).exists() for up in folders)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_on_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert file.suffix != ".png" or 1_000 < file.stat().st_size < 60_000
            headings = re.findall(r"^#+ (.+)", file.read_text(), re.M) if anchor else []
            assert not anchor or anchor in {
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings
            }


@pytest.mark.parametrize("folder", [ROOT, TEMPLATE], ids=["repository", "template"])
def test_instructions_for_programs_are_short(folder: Path) -> None:
    assert len((folder / "AGENTS.md").read_text().splitlines()) <= 60


def test_every_page_is_found_from_readme_and_in_the_site() -> None:
    def linked(page: Path) -> set[Path]:
        found = re.findall(r"\]\((?!https?:|#)([^)#]+\.md)", page.read_text())
        return {(page.parent / target).resolve() for target in found}

    pages = set(ROOT.glob("docs/**/*.md"))
    near = linked(ROOT / "README.md")
    assert pages <= near | {target for page in near for target in linked(page)}
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert {page.name for page in pages} <= {*re.findall(r"[\w-]+\.md", navigation)}


def test_pictures_load_nothing_from_elsewhere() -> None:
    pictures = [*ROOT.glob("docs/pictures/*.svg")]
    assert pictures
    for picture in pictures:
        text = re.sub(r'xmlns(:\w+)?="[^"]+"|<!--.*?-->', "", picture.read_text(), flags=re.S)
        assert "://" not in text


def test_every_command_is_documented() -> None:
    documented = {name for page in PAGES for name, _ in commands(page)}
    assert documented >= known_commands().keys()
