"""Each command of the documentation runs as written, or a named test covers it.

The commands run in a project whose ``configs/local.yaml`` shortens each epoch to two batches. Placeholders of readers'
own runs and files stand for a run and files of this project.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from new_project import in_shell
from PIL import Image
from test_docs import PAGES, TEMPLATE, TEMPLATE_PAGES

from boltcutter.project import Project
from boltcutter.scaffold import new

ALL = [*PAGES, ROOT / "SECURITY.md", *TEMPLATE_PAGES]
OURS = r"(?:python scripts/{0}\.py|boltcutter {0})"
RUN = [  # patterns of whole commands
    r"python scripts/train\.py"
    r"(?: (?:model|trainer\.max_epochs|data\.\w+|debug|optimizer|optimizer\.lr|callback|folder|logger|report)=\S+)*",
    r"python scripts/train\.py data=digits data\.num_folds=5.*",
    r"python scripts/train\.py (?:experiment=diabetes|debug=\S+ experiment=diabetes|--help|--describe data)",
    r"python scripts/train\.py (?:resume|reproduce)=runs/digits-convnet/<id>.*",
    r"python scripts/train\.py trainer=ddp trainer\.accelerator=cpu trainer\.devices=2",
    r"torchrun --nproc-per-node 2 scripts/train\.py trainer\.accelerator=cpu trainer\.devices=2",
    r"python scripts/train\.py && python scripts/export\.py run=runs/digits-convnet/<id> export=\S+",
    r"boltcutter train model=mlp trainer\.max_epochs=3 --json",
    r"boltcutter check (?:--batch )?model=\w+(?: --json)?",
    r"boltcutter runs(?! --live).*",
    r"boltcutter compare (?:--metric test/accuracy .*|runs/a runs/b)",
    r"boltcutter doctor (?:experiment=gpt_124m data=text|run=<folder>) devices=\d memory=\d+GiB",
    r"python scripts/evaluate\.py run=<folder>(?! split=all).*",
    r"python scripts/predict\.py run=(?:<folder>|runs/…) (?:export=onnx )?input=(?:digit\.png,)?(?:more|photos)/",
    r"python scripts/predict\.py run=<folder> input='more/\*\.png'",
    r"python scripts/export\.py run=(?:<folder>|runs/…) export=(?:\[[\w,-]+\]|onnx|none)(?: export\.register=digits)?",
    r"python scripts/search\.py search=optuna --(?:check|describe)",
    r"boltcutter train --(?:help|describe)(?: optimizer)?",
    r"BOLTCUTTER_DEBUG=1 python scripts/train\.py",
    r"eval \"\$\(boltcutter train --completion\)\"",
    # of the template's pages, in a new project
    r"python scripts/train\.py model\.hidden_size=128 trainer\.max_epochs=50",
    r"python scripts/train\.py (?:resume|reproduce)=runs/<name>/<id>",
    r"python scripts/evaluate\.py run=runs/<name>/<id> split=val",
    r"python scripts/predict\.py run=runs/<name>/<id> input=measurements\.csv",
    r"python scripts/export\.py run=runs/<name>/<id> export=onnx",
    r"boltcutter check (?:model\.hidden_size=128 --json|--batch)",
]
CLOUD = "needs an account or a cluster, for which the tests have servers of their own"
ELSEWHERE = {  # pattern of whole commands: (the reason why they do not run here, the test that covers them)
    r"(?:cookiecutter|cruft) .*|boltcutter new my-project": ("they create or update a project", "scaffold/test_new.py"),
    r"boltcutter (?:add|vendor)\b.*": (
        "they write files",
        "test_docs.py::test_commands_that_write_files_work_as_documented",
    ),
    r"git (?:mv|grep) .*": ("they rename a project", "scaffold/test_new.py::test_a_project_is_renamed_as_documented"),
    r"boltcutter audit\b.*": ("it trains", "planning/test_audit.py"),
    r"boltcutter why .*--hang": ("they need a run that hangs", "analysis/test_hang.py"),
    r"boltcutter why .*": ("they need a run with a fault", "replay/test_why.py"),
    r"boltcutter bisect .*": ("they need two runs that differ", "replay/test_bisection.py"),
    r"boltcutter golden .*": (
        "they need a run of the reader",
        "replay/test_golden.py::test_a_training_is_repeated_and_compared",
    ),
    r"boltcutter train model=mlp trainer.max_steps=20": (
        "it is the run of golden",
        "replay/test_golden.py::test_a_training_is_repeated_and_compared",
    ),
    r"boltcutter info .*": ("they need a run of the reader", "analysis/test_checkpoint.py"),
    r"boltcutter import .*": ("they convert a project of the reader", "scaffold/test_port.py"),
    r"(?:cd my-project && )?python3 -m venv .*": (
        "they install packages",
        "test_workflows.py::test_the_pinned_versions_can_be_installed",
    ),
    r"uv pip compile .*|cp constraints\.txt .*": (
        "they change pins",
        "test_workflows.py::test_constraints_are_renewed_as_documented",
    ),
    r"source \.venv/bin/activate": ("it is of the reader's shell", "scaffold/test_uv.py"),
    r"uv (?:venv|run) .*": ("they need uv", "scaffold/test_uv.py"),
    r"(?:uv tool|pip) install .*": ("they install packages", "test_docs.py::test_extras_and_files_on_a_page_exist"),
    r"python scripts/lightning_suite\.py.*": ("needs a checkout of Lightning, and hours", "test_lightning_suite.py"),
    r"boltcutter (?:try|tries|mcp)\b.*": ("they train for minutes, or serve", "tries/test_command.py"),
    r"wandb artifact put .*": ("uploads to an account", "logger/test_wandb.py"),
    r"(?:gcloud|gsutil) .*|.* launch=vertex .*": (CLOUD, "launch/cloud/test_vertex.py"),
    r"aws s3 .*": (CLOUD, "launch/test_sky.py"),
    r"(?:az|for id in) .*|.* launch=azureml .*": (CLOUD, "launch/cloud/test_azureml.py"),
    r"kubectl .*|.* launch=kubernetes .*": (CLOUD, "launch/test_kubernetes_cluster.py"),
    r"(?:sky|ssh) .*|.* launch=sky .*": (CLOUD, "launch/test_sky.py"),
    r"docker .*|.* launch=container .*": ("needs an image of gigabytes", "launch/test_container.py"),
    r"(?:salloc|srun) .*|.* launch=slurm .*": ("needs SLURM", "launch/test_slurm_cluster.py"),
    r"ray job .*|python scripts/launch\.py launch=ray .*": ("needs a Ray cluster", "launch/test_ray.py"),
    r"python scripts/launch\.py (?:status|logs|cancel|fetch|list)\b.*": (
        "need a launched run",
        "launch/test_command.py",
    ),
    r"python scripts/evaluate\.py run=<folder> split=all .*": (
        "need labelled files of the reader",
        "evaluation/test_evaluate.py::test_all_samples_are_evaluated_and_counted",
    ),
    r"python scripts/\w+\.py (?:runs|resume|run)=s3://.*": (CLOUD, "run/remote/test_mirror.py"),
    r"(?:python|boltcutter) .*\bruns/killed\b.*": ("it is killed after some seconds", "test_faults.py"),
    r"boltcutter bench .*": ("measures for minutes", "planning/test_bench.py"),
    r"mpirun .*": ("needs MPI", "strategy/test_mpi.py"),
    r"bash \.ci/run|(?:\w+=\S+ )*pytest .*": ("they are tests", "test_workflows.py"),
    r"python scripts/search\.py search=(?:asha|pbt) .*": ("need Ray Tune, for minutes", "search/test_ray_tune.py"),
    r"python scripts/search\.py (?:search|resume)=.*|boltcutter search .*": (
        "train for hours",
        "search/test_command.py",
    ),
    r"python scripts/serve\.py .*|curl .*": ("run until they are stopped", "export/serving/test_server.py"),
    r"boltcutter runs --live.*": ("run until they are stopped", "analysis/test_live.py"),
    r"hf auth login|.* export\.push=\S+": ("need an account", "export/test_hub.py"),
    r"python scripts/export\.py .* export=(?:int4|int8-dynamic|\[int8,int8-static,int4\]).*": (
        "need a GPT or a quantized run",
        "export/test_formats.py",
    ),
    r"python scripts/predict\.py .*input=\"def main.*": ("need a GPT", "prediction/test_generate.py"),
    r".* experiment=(?:gpt_small|mnist) ?.*|.* data=(?:text|mnist) .*": (
        "train for an hour, or need files",
        "test_docs.py::test_commands_on_a_page_are_valid",
    ),
    r".* data=huggingface .*": ("need files of the Hub", "data/test_huggingface.py"),
    r"python scripts/train\.py .*trainer\.devices=8.*": ("need eight GPUs", "strategy/test_model_parallel.py"),
    r"python scripts/train\.py task=mine .*": ("need a module of the reader", "third_party/test_gallery.py"),
    r"(?:cd docs/gallery|boltcutter (?:train|search|compare) .*experiment=\w+).*": (
        "train for minutes",
        "test_examples.py",
    ),
}
OF_A_SCRIPT = {"docs/ray.md": "launch/test_ray_slurm.py"}  # blocks that begin with #!, as a whole
PYTHON = {  # blocks that are parts of files: the test of the files
    "docs/bisect.md": "replay/test_golden.py::test_a_training_is_repeated_and_compared",
    "docs/extending.md": "test_extend.py::test_the_page_is_made_from_the_distribution_and_the_fields_of_a_part",
    "docs/export.md": "export/test_runner.py",
    "docs/from-my-script.md": "test_commands.py::test_the_sessions_of_a_page_print_what_it_shows",
}
OBJECTS = """
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import boltcutter


class MyModule(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch))


class MyDataModule(BoringDataModule):
    pass


"""
LOGS = """
class Logs(MyModule):
  def on_train_start(self):
    x = torch.rand(2, 3, 4, 4)
"""
READ_LOGS = """
run = boltcutter.train("logger=null", "trainer.max_epochs=1", task=Logs(), data=MyDataModule())
assert [*run.glob("media/val/samples*/*.png")] and [*run.glob("media/val/words*/*.csv")]
assert len(parameter_groups(torch.nn.Linear(2, 2))) == 2
"""
FOUND = """
trainer = L.Trainer(max_epochs=1, limit_val_batches=1, callbacks=[Invariants()])
trainer.fit(MyModule(), torch.utils.data.DataLoader(torch.zeros(10_001, 32), batch_size=10_001))
assert "large-batch" in [finding.check for finding in trainer.callbacks[0].findings]
"""
WAVES = """
import numpy as np
for name in ("high", "low"):
    Path("waves", name).mkdir(parents=True)
    for seed in range(10):
        noise = np.random.default_rng(seed).normal(0, 1000, 4000).astype(np.int16)
        wavfile.write(f"waves/{name}/{seed}.wav", 8000, noise)
data = Sounds("waves", batch_size=4)
data.setup("fit")
assert next(iter(data.train_dataloader()))[0].shape[1:] == (1, 129, 64)
assert int((x == 0).sum()) == 2 * 129 * 20
"""
ENSEMBLE = """
import random
from pathlib import Path
from types import SimpleNamespace
import boltcutter
import numpy
import pandas
import torch
import torch.nn.functional as F
from PIL import Image
texts, tokenizer = ["ab", "c"], SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
runs = [boltcutter.train("logger=null", "trainer.max_epochs=1", "report=false", f"seed={seed}") for seed in (0, 1)]
x = torch.zeros(2, 1, 8, 8)
run = runs[0]
Image.new("L", (8, 8)).save("digit.png")
from sklearn.metrics import precision_recall_curve
rows = pandas.DataFrame({"age": range(200), "label": ["no", "yes"] * 100})
rows.to_csv("table.csv", index=False)
rows[["age"]].to_csv("new.csv", index=False)
chosen = ["model=mlp", "data=tabular", "data.path=table.csv", "data.target=label", "data.batch_size=16"]
folder = boltcutter.train("logger=null", "trainer.max_epochs=1", "report=false", *chosen)
boltcutter.evaluate(run=folder, split="val")
boltcutter.predict(run=folder, input="new.csv")
trials = [folder, folder]
"""
ENSEMBLED = """
assert numpy.load("tokens.npy").tolist() == [97, 98, 99]
assert probabilities.shape == (2, 10) and kept["features"].shape[0] == 1
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
module = SimpleNamespace(teacher=net, student=net, log_dict=dict)
assert mixed_loss(net, torch.zeros(2, 1, 8, 8), torch.zeros(2).long()).requires_grad
assert 0 < threshold < 1 and len(out_of_fold) == 60 and len(pandas.read_csv("more.csv")) >= 200
assert training_step(module, (torch.zeros(2, 1, 8, 8), torch.zeros(2).long())).requires_grad
"""
PROGRAMS = {  # what readers have before and after the blocks of a page, which run as one program in a project
    "CONTRIBUTING.md": ("from torch import nn\n", "Tiny((8, 8), 10)"),
    "docs/configuration.md": ("from torch import nn\n", "MyModel((8, 8))"),
    "docs/data.md": ("import torch\nself, x = torch.nn.Identity(), torch.ones(2, 1, 129, 64)\n", WAVES),
    "docs/fine-tuning.md": (
        "import torch\nfrom torch import nn\n",
        "assert Head(nn.Linear(3, 4), 2)(torch.zeros(1, 3)).requires_grad",
    ),
    "docs/recipes.md": (ENSEMBLE, ENSEMBLED),
    "docs/api.md": (OBJECTS, "assert boltcutter.load(run, task=MyModule(), data=MyDataModule()).task is not None"),
    "docs/diagnosis.md": (OBJECTS, FOUND),
    "docs/machines.md": (
        "",
        "assert check(['trainer.max_epoch=3', 'model=mlp']) == ['trainer.max_epochs=3', 'model=mlp']",
    ),
    "docs/modules.md": (OBJECTS + LOGS, READ_LOGS),
}


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of the blocks ``console``, which begin with ``$``, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    text = "\n".join(blocks(page, "console"))
    for line in re.sub(r"^(\$ .*)\\\n", r"\1", text, flags=re.M).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() not in ("", "…"):
            found[-1][1].append(line.strip())
    return found


def missing_lines(printed: str, expected: list[str]) -> list[str]:
    """The lines that are not printed, in their order; ``…`` stands for any text."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    patterns = [(line, ".*".join(map(re.escape, " ".join(line.split()).split("…")))) for line in expected]
    return [line for line, pattern in patterns if not any(re.fullmatch(pattern, each) for each in lines)]


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of a page, of these languages."""
    return [
        text for kind, text in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S) if kind in kinds
    ]


def commands(page: Path) -> list[str]:
    """The lines of the blocks for a shell, without comments, in their order."""
    scripts = [text for text in blocks(page, "bash", "sh") if not text.startswith("#!")]
    lines = [line for text in scripts for line in text.replace("\\\n", " ").splitlines()]
    return [found for line in lines if (found := " ".join(re.sub(r"(^|\s+)# .*$", "", line).split()))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_run(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in RUN)


@pytest.mark.parametrize("page", ALL, ids=name)
def test_each_command_is_run_or_covered(page: Path) -> None:
    uncovered = [c for c in commands(page) if not is_run(c) and not any(re.fullmatch(p, c) for p in ELSEWHERE)]
    assert not uncovered
    scripts = [text for text in blocks(page, "bash", "sh") if text.startswith("#!")]
    assert bool(scripts) == (name(page) in OF_A_SCRIPT)


@pytest.mark.parametrize(
    "covering", sorted({test for _, test in ELSEWHERE.values()} | {*OF_A_SCRIPT.values(), *PYTHON.values()})
)
def test_a_covering_test_exists(covering: str) -> None:
    file, _, function = covering.partition("::")
    assert re.search(rf"^def {function or 'test_'}", (ROOT / "tests" / file).read_text(), re.M)


@pytest.mark.parametrize("page", ALL, ids=name)
def test_no_command_is_in_a_block_that_is_not_read(page: Path) -> None:
    command = re.compile(r"\$ |(?:\w+=\S+ )*(?:python|boltcutter|pytest|mpirun|bash|pip) ")
    assert not [line for text in blocks(page, "") for line in text.splitlines() if command.match(line)]


def test_each_exception_is_needed() -> None:
    written = [command for page in ALL for command in commands(page)]
    assert not [pattern for pattern in [*RUN, *ELSEWHERE] if not any(re.fullmatch(pattern, c) for c in written)]
    assert not [page for page in [*OF_A_SCRIPT, *PYTHON] if not (ROOT / page).is_file()]


def test_each_python_block_is_run_or_covered() -> None:
    assert {name(page) for page in ALL if blocks(page, "python")} == {*PYTHON, *PROGRAMS}


SHORT = """trainer:
  limit_train_batches: 2
  limit_val_batches: 2
  limit_test_batches: 2
logger: null
"""
COMPARED = "python scripts/train.py seed={seed} trainer.max_epochs=1 report=false {override}"
BEFORE = {
    "docs/compare.md": [COMPARED.format(seed=n, override="model=mlp task.label_smoothing=0.1") for n in (0, 1)],
}  # commands that readers of a page have given before
STAND_INS = [  # what readers replace in commands: the folder of a run, and its id
    (r"<folder>|runs/…|runs/<name>/<id>", "runs/first/run"),
    (r"runs/digits-convnet/<id>", "runs/first/run"),
]


def call(project: Path, command: str) -> None:
    """Run a command in a shell, in a project."""
    for pattern, stand_in in STAND_INS:
        command = re.sub(pattern, stand_in, command)
    differs = " || [ $? = 1 ]" if command.startswith("boltcutter compare ") else ""  # of runs that differ, as diff
    in_shell(command + differs, project)


@contextmanager
def same_runs(project: Path, folder: Path) -> Iterator[None]:
    """Restore the runs of a project: those of one page, also that it resumes, are not those of the next."""
    before, runs = folder / "runs", project / "runs"
    if not runs.exists():
        yield
        return
    shutil.copytree(runs, before)
    try:
        yield
    finally:
        shutil.rmtree(runs)
        shutil.copytree(before, runs)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the built-in options, like a clone of the repository, a trained run and a few files."""
    project = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "configs").mkdir()
    (project / "configs" / "local.yaml").write_text(SHORT)
    (project / "pyproject.toml").write_text("[tool.boltcutter]\n")
    (project / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "demo.py", project / "docs")
    for file in ("digit.png", "more/1.png", "photos/1.png"):
        (project / file).parent.mkdir(exist_ok=True)
        Image.fromarray(np.eye(8, dtype="uint8") * 255).save(project / file)
    call(project, "python scripts/train.py trainer.max_epochs=1 folder=runs/first/run")
    for seed in (0, 1):
        for override in ("model=convnet", "model=mlp"):
            call(project, COMPARED.format(seed=seed, override=override))
    return project


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project with a trained run and a table."""
    project = new.new_command(Project.at(ROOT), ["my-project", f"folder={tmp_path_factory.mktemp('created')}"])
    (project / "configs" / "local.yaml").write_text(SHORT)
    (project / "measurements.csv").write_text(",".join("1" * 30) + "\n")
    call(project, "python scripts/train.py folder=runs/first/run")
    return project


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", [page for page in ALL if any(map(is_run, commands(page)))], ids=name)
def test_the_commands_of_a_page_run(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    project = request.getfixturevalue("created" if TEMPLATE in page.parents else "clone")
    with same_runs(project, tmp_path):
        for command in (*BEFORE.get(name(page), ()), *filter(is_run, commands(page))):
            call(project, command)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project as readers have it."""
    return new.new_command(Project.at(ROOT), ["my-project", f"folder={tmp_path_factory.mktemp('fresh')}"])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of docs/from-my-script.md, and the YAML files that the page shows."""
    folder, page = tmp_path_factory.mktemp("own"), ROOT / "docs" / "from-my-script.md"
    for text in blocks(page, "python", "yaml"):
        file = folder / re.sub(r"^# ([\w./]+).*", r"\1", text.splitlines()[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


SESSIONS = {  # else in the clone
    "docs/first-project.md": "fresh",
    "docs/from-my-script.md": "own",
    "docs/cloud.md": "fresh",  # which is a repository
}
STOPPED = (  # once it has answered
    "{0} > served 2>&1 & for i in {{1..900}}; do grep -q http served && break; sleep 0.2; done; kill $!; cat served"
)


def test_lines_that_a_page_shows_are_compared() -> None:
    assert missing_lines("a  1.5 s\nb 2\n", ["a … s", "b 2"]) == []
    assert missing_lines("b 2\na 1\n", ["a 1", "b 2"]) == ["b 2"]
    assert sessions(ROOT / "docs" / "first-project.md")[0][1]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", [page for page in ALL if sessions(page)], ids=name)
def test_the_sessions_of_a_page_print_what_it_shows(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    project = request.getfixturevalue(SESSIONS.get(name(page), "clone"))
    with same_runs(project, tmp_path):
        for command, expected in sessions(page):
            if command.startswith("boltcutter serve "):  # until it is stopped
                command = STOPPED.format(command)
            printed = in_shell(f"({command}) 2>&1 || true", project)
            assert missing_lines(printed, expected) == [], command


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_python_blocks_of_a_page_run(page: str, clone: Path) -> None:
    (before, after), (first, *others) = PROGRAMS[page], blocks(ROOT / page, "python")
    if first.startswith("self."):  # lines of a method
        first = textwrap.indent(first, "    ")
    program = "\n".join([before + first, *others, after]).replace('device="cuda:0"', 'device="cpu"')
    (clone / "blocks.py").write_text(program)
    call(clone, "python -W ignore blocks.py")
