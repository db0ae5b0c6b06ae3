"""Mistakes of users: each is reported in one line that begins with the setting and ends with the remedy."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from repairs import FILES_NOT_REPAIRED, LEFT_OUT, NOT_REPAIRED, REPAIRED

from boltcutter.cli.file_fix import locate
from boltcutter.cli.main import dispatch_command
from boltcutter.cli.mistake import explain
from boltcutter.cli.table import COMMANDS
from boltcutter.config.errors import ConfigError, Mistake
from boltcutter.environment.startup import restored_signals
from boltcutter.project import Project

PROJECT = Project.find(__file__)
DDP = "trainer=ddp trainer.accelerator=cpu trainer.devices=2"
THIRD_PARTY = Path(__file__).parent / "third_party" / "configs"
GAN = f"task={THIRD_PARTY}/task/gan.yaml data={THIRD_PARTY}/data/digits.yaml"
MINE = "configs/experiment/mine.yaml: "
MLP = "_target_: boltcutter.model.mlp.MLP\ninput_shape: ${data.shape}\nnum_classes: ${data.num_classes}\n"
AS_LIST = "".join(f"- {line}\n" for line in MLP.splitlines())
STOPPING = "callback=[default,early_stopping]"
Refusal = Callable[..., list[Mistake]]
Script = Callable[..., subprocess.CompletedProcess[str]]

# Overrides, the beginning of the message, and a part of its remedy.
MISTAKES = [
    # Keys.
    ("foo=1", "foo: ", "--print"),
    ("+foo=1", "foo: ", "--print"),
    ("sed=1", "sed: ", "did you mean seed?"),
    ("lr=1", "lr: ", "did you mean optimizer.lr?"),
    ("trainr.devices=1", "trainr.devices: ", "did you mean trainer.devices?"),
    ("trainer.devces=1", "trainer.devces: ", "did you mean devices?"),
    ("data.quite=1", "data.quite: ", "--describe data"),
    ("model=mlp model.hidden_size=[3]", "model.hidden_size: ", "did you mean hidden_sizes?"),
    ("task.loss=mse", "task.loss: ", "--describe task"),
    ("task.optimizer.lrr=1", "optimizer.lrr: ", "did you mean lr?"),
    ("optimizer.beta=1", "optimizer.beta: ", "did you mean betas?"),
    ("scheduler.warmup_rato=1", "scheduler.warmup_rato: ", "did you mean warmup_ratio?"),
    ("callback.best.save_top=1", "callback.best.save_top: ", "did you mean save_top_k?"),
    ("callback.bst.monitor=x", "callback.bst.monitor: ", "did you mean callback.best.monitor?"),
    ("task.metrics.f1.averag=macro", "task.metrics.f1.averag: ", "did you mean average?"),
    ("choices=3", "choices=3: ", "model=mlp"),
    ("choices.model=mlp", "choices.model=mlp: ", "model=mlp"),
    # Keyword arguments that a class would pass on unchecked.
    (
        f"{DDP} trainer.strategy.find_unused_parametrs=true",
        "trainer.strategy.find_unused_parametrs: ",
        "did you mean find_unused_parameters?",
    ),
    ("logger=tensorboard logger.tensorboard.flush_sec=3", "logger.tensorboard.flush_sec: ", "did you mean flush_secs?"),
    ("logger.wandb.entitty=me", "logger.wandb.entitty: ", "did you mean entity?"),
    (
        "logger.wandb._target_=lightning.pytorch.loggers.WandbLogger logger.wandb.entitty=me",
        "logger.wandb.entitty: ",
        "did you mean entity?",
    ),
    # Types.
    ("seed=a", "seed=a: ", "int"),
    ("seed=1.5", "seed=1.5: ", "int"),
    ("seed=true", "seed=true: ", "int"),
    ("seed=null", "seed=null: ", "int"),
    ("seed='\"3\"'", "seed='3': ", "int"),
    ("test=1", "test=1: ", "bool"),
    ("report=no", "report=no: ", "bool"),
    ("name=null", "name=null: ", "str"),
    ("runs=3", "runs=3: ", "Path"),
    ("optimizer.lr=fast", "optimizer.lr=fast: ", "float | Tensor"),
    ("data.batch_size=64.5", "data.batch_size=64.5: ", "int"),
    ("data.batch_size=null", "data.batch_size=null: ", "int"),
    ("data.split=0.5", "data.split=0.5: ", "tuple[float, float, float]"),
    ("data.split=[0.5,0.5]", "data.split=[0.5,0.5]: ", "tuple[float, float, float]"),
    ("model=mlp model.hidden_sizes=3", "model.hidden_sizes=3: ", "Sequence[int]"),
    ("model=mlp model.hidden_sizes=32,16", "model.hidden_sizes=32,16: ", "Sequence[int]; did you mean [32,16]?"),
    ("model=mlp model.hidden_sizes=[3,a]", "model.hidden_sizes=[3,a]: ", "Sequence[int]"),
    ("model=mlp model.dropout=yes", "model.dropout=yes: ", "float"),
    ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5: ", "int | null"),
    ("task.metrics.f1=3", "task.metrics.f1=3: ", "Metric"),
    # One of several.
    (
        "model=mlp model.activation=rellu",
        "model.activation=rellu: ",
        "'relu' | 'gelu' | 'silu' | 'tanh'; did you mean relu?",
    ),
    ("model=resnet model.depth=19", "model.depth=19: ", "18 | 34 | 50"),
    ("task=regression task.loss=mze", "task.loss=mze: ", "'mse' | 'l1' | 'huber'; did you mean mse?"),
    ("task.interval=stepp", "task.interval=stepp: ", "'step' | 'epoch'; did you mean step?"),
    ("task.metrics.f1.average=macroo", "task.metrics.f1.average=macroo: ", "did you mean macro?"),
    ("trainer.precision=bf17", "trainer.precision=bf17: ", "did you mean bf16?"),
    ("logger.wandb.mode=of", "logger.wandb.mode=of: ", "'auto' | 'online' | 'offline' | 'disabled'"),
    ("callback.best.mode=minn", "callback.best.mode=minn: ", "'min' | 'max'; did you mean min?"),
    # Options and groups.
    ("model=nlp", "model=nlp: ", "did you mean mlp?"),
    ("model=", "model=: ", "convnet, gpt, "),
    ("model=/nowhere/x.yaml", "model=/nowhere/x.yaml: ", "convnet, gpt, "),
    ("callback=[default,emma]", "callback=emma: ", "did you mean ema?"),
    ("experiment=[mnist,foo]", "experiment=foo: ", "gpt_small, mnist"),
    ("debug=overfitt", "debug=overfitt: ", "did you mean overfit?"),
    ("modle=mlp", "modle: ", "did you mean model?"),
    ("~modle", "modle: ", "did you mean model?"),
    ("model=null", "task.model=null: ", "Module"),
    ("~task", "task=null: ", "LightningModule"),
    ("optimizer=null", "task.optimizer=null: ", "Callable[..., Optimizer]"),
    ("data=null", "model.input_shape: ${data.shape} ", "set model.input_shape="),
    # Calls.
    ("optimizer._target_=torch.optim.Adamm", "optimizer._target_: ", "did you mean Adam?"),
    ("optimizer._target_=torch.optimm.Adam", "optimizer._target_: ", "did you mean optim?"),
    ("model._target_=ConvNet", "model._target_: ", "full dotted path"),
    ("optimizer._target_=no_such_package.Adam", "optimizer._target_: no_such_package.Adam: ", "full dotted path"),
    ("optimizer._target_=torch.pi", "optimizer._target_: torch.pi ", "full dotted path"),
    ("optimizer._target_=", "optimizer._target_: ", "dotted path"),
    ("model._target_=collections.OrderedDict", "model=collections.OrderedDict: ", "Module | null"),
    (
        "+callback.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
        "callback.mine.scheduling: ",
        "dict[int, int]",
    ),
    ("+callback.mine=3", "callback.mine=3: ", "Callback | null"),
    # References.
    ("trainer.max_epochs=???", "trainer.max_epochs: ", "give trainer.max_epochs=…"),
    ("seed=???", "seed: ", "give seed=…"),
    ("optimizer.lr=${optimizr.eps}", "optimizer.lr: ${optimizr.eps} ", "did you mean optimizer?"),
    ("optimizer.lr=${oc.env:NO_SUCH_VARIABLE}", "optimizer.lr: ", "export NO_SUCH_VARIABLE=…"),
    ("optimizer.lr=${oc.envv:X}", "optimizer.lr: ", "oc.envv"),
    ("name=${name}", "name: ", "correct the reference"),
    ("optimizer.lr=${", "optimizer.lr=${: ", "correct the value"),
    ("~seed", "data.seed: ${seed} ", "set data.seed="),
    # Values that a constructor refuses.
    ("seed=-1", "seed=-1 ", "try 0"),
    ("data.batch_size=-4", "data.batch_size=-4 ", "try 64"),
    ("data.num_workers=-1", "data.num_workers=-1 ", "try 0"),
    ("data.shape=[1,9,9]", "data.shape=(1, 9, 9), data.num_classes=10: ", "keep the defaults"),
    ("model=mlp model.dropout=2", "model.dropout=2.0 ", "try 0.1"),
    ("model=mlp model.hidden_sizes=[]", "model.hidden_sizes=[] ", "try model=linear"),
    ("model.input_shape=[3]", "model.input_shape=(3,): ", "try model=mlp"),
    ("task.label_smoothing=2", "task.label_smoothing=2.0 ", "try 0.1"),
    ("task.l1=-1", "task.l1=-1.0 ", "try 0"),
    ("optimizer.lr=1e400", "optimizer.lr=1e400: ", "expected float"),
    ("optimizer.weight_decay=.inf", "optimizer.weight_decay=.inf ", "correct it, or remove it"),
    ("scheduler=onecycle scheduler.max_lr=.inf", "scheduler.max_lr=.inf ", "correct it, or remove it"),
    ("optimizer=sgd optimizer.momentum=1", "optimizer.momentum=1.0 ", "try 0.9"),
    (f"{STOPPING} callback.early_stopping.patience=-1", "callback.early_stopping.patience=-1 ", "try 5"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: ", "learning rate: -1.0; correct it"),
    ("scheduler.warmup_ratio=2", "scheduler.warmup_ratio=2.0 ", "try 0.05"),
    ("scheduler=onecycle scheduler.pct_start=2", "scheduler.pct_start=2.0: ", "correct it"),
    ("trainer.max_epochs=-3", "trainer.max_epochs=-3", "try 10, or -1 for no limit"),
    ("trainer.max_time=soon", "trainer.max_time=soon: ", "such as 30m; correct it, or remove it"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 ", "null for no clipping"),
    ("trainer.limit_train_batches=0", "trainer.limit_train_batches=0 ", "try 1.0"),
    ("trainer.limit_train_batches=-2", "trainer.limit_train_batches=-2: ", "correct it"),
    (
        "callback.best.every_n_epochs=0 callback.best.every_n_train_steps=2 callback.best.train_time_interval=3",
        "callback.best: ",
        "every_n_epochs=0",
    ),
    # Devices.
    ("trainer.accelerator=gpuu", "trainer.accelerator=gpuu: ", "correct it, or remove it"),
    ("trainer.strategy=ddpp", "trainer.strategy=ddpp: ", "did you mean ddp?"),
    ("trainer.devices=0", "trainer.devices=0 ", "try trainer.devices=1"),
    ("trainer.devices=-3", "trainer.devices=-3 ", "try trainer.devices=1"),
    ("trainer.devices=two", "trainer.devices=two ", "try trainer.devices=1"),
    ("trainer.devices=999", "trainer.devices=999: ", "trainer.accelerator=cpu"),
    ("trainer.accelerator=cuda trainer.devices=999", "trainer.accelerator=cuda, trainer.devices=999: ", "try "),
    ("trainer.accelerator=cpu trainer.devices=3", "data.batch_size=64 ", "try 66"),
    # Incompatible settings.
    ("task.metrics.f1.num_classes=3", "task.metrics.f1.num_classes=3, ", "set task.metrics.f1.num_classes=10"),
    ("task=regression", "task=regression ", "try task=classification"),
    ("data=synthetic data.kind=regression", "task=classification ", "try task=regression"),
    ("experiment=diabetes model=convnet ~model.hidden_sizes", "model.input_shape=(10,): ", "try model=mlp"),
    ("callback.best.monitor=val/acc", "callback.best.monitor=val/acc ", "did you mean val/accuracy?"),
    (
        f"{STOPPING} callback.early_stopping.monitor=val/los",
        "callback.early_stopping.monitor=val/los ",
        "did you mean val/loss?",
    ),
    ("task.monitor=val/los", "task.monitor=val/los ", "did you mean val/loss?"),
    ("trainer.val_check_interval=0", "trainer.val_check_interval=0 ", "try 1.0"),
    ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 ", "try 1"),
    ("data.seed=-1", "data.seed=-1 ", "try 0"),
    ("trainer.logger=false", "trainer.logger: ", "use logger=… instead"),
    ("trainer.callbacks=[]", "trainer.callbacks: ", "use callback=… instead"),
    (
        "trainer.enable_progress_bar=false",
        "trainer.enable_progress_bar=false: ",
        "use callback.progress=null instead",
    ),
    (
        "trainer.enable_checkpointing=false",
        "trainer.enable_checkpointing=false: ",
        "use callback.best=null callback.last=null instead",
    ),
    # A LightningModule that defines its own model and optimizer.
    (f"{GAN} model=mlp", "model=mlp: ", "refer to it as ${model} in task=gan"),
    (f"{GAN} optimizer.lr=0.1", "optimizer.lr=0.1: ", "refer to it as ${optimizer} in task=gan"),
    (f"task={THIRD_PARTY}/task/gan.yaml data=null", "data=null: ", "choose data=…"),
    ("task._target_=pathlib.Path", "task=pathlib.Path: ", "LightningModule"),
    (
        f"{GAN} task._target_=third_party.libraries.tinynet",
        "task._target_=third_party.libraries.tinynet: ",
        "lightning.pytorch.LightningModule",
    ),
    # Secrets.
    (
        "+logger.wandb.api_key=abc",
        "logger.wandb.api_key: ",
        "write 'logger.wandb.api_key=${oc.env:API_KEY}' and set API_KEY",
    ),
    ("+password=1234", "password: ", "write 'password=${oc.env:PASSWORD}' and set PASSWORD"),
    # Earlier runs.
    ("resume=/nowhere", "resume=/nowhere: ", "give the folder of a run"),
    ("reproduce=/tmp", "reproduce=/tmp: ", "give the folder of a run"),
    ("resume=/tmp reproduce=/tmp", "resume and reproduce ", "give one of them"),
    # Overrides and flags.
    ("''", "'': ", "group=option, key=value, +key=value or ~key"),
    ("~", "~: ", "group=option, key=value, +key=value or ~key"),
    ("+", "+: ", "group=option, key=value, +key=value or ~key"),
    ("=1", "=1: ", "group=option, key=value, +key=value or ~key"),
    ("seed", "seed: ", "group=option, key=value, +key=value or ~key"),
    ("~seed=1", "~seed=1: ", "~seed"),
    ("~foo", "foo: ", "--print"),
    ("model=[mlp", "model: ", "quote it for the shell"),
    ("--chek", "--chek: ", "did you mean --check?"),
    ("--check --foo", "--foo: ", "--print, --check"),
    ("--check --print", "--print: ", "give one of them"),
    ("--describe trainer.max_epoch", "trainer.max_epoch: ", "did you mean trainer.max_epochs?"),
]
WITHOUT = {*LEFT_OUT, f"{GAN} model=mlp", f"{GAN} optimizer.lr=0.1", f"{GAN[: GAN.index(' ')]} data=null"}
UNREPAIRED = {*NOT_REPAIRED, f"{GAN} task._target_=third_party.libraries.tinynet"}
# The same for a file of the project and its contents.
FILES = [
    ("model/mlp", f"{MLP}hidden_sizes: [1", "model=mlp", "configs/model/mlp.yaml:5: ", ""),
    ("model/mlp", f"{MLP}hidden_sizes:\n\t- 2", "model=mlp", "configs/model/mlp.yaml:5: ", ""),
    ("model/mlp", f"{MLP}dropout: 0\ndropout: 0.5", "model=mlp", "configs/model/mlp.yaml:5: ", "duplicate key dropout"),
    ("model/mlp", AS_LIST, "model=mlp", "configs/model/mlp.yaml: ", "keys with values"),
    ("model/mlp", f"{MLP}dropout: ${{b", "model=mlp", "configs/model/mlp.yaml: ", ""),
    ("model/mlp", f"defaults: mlp\n{MLP}", "model=mlp", "configs/model/mlp.yaml: ", "correct its defaults"),
    ("model/mlp", "hidden: [3]", "model=mlp", "model={hidden: [3]}: ", "Module"),
    (
        "optimizer/adamw",
        "_target_: torch.optim.AdamW\nlr: 1",
        "",
        "optimizer.params: ",
        "write optimizer._partial_=true",
    ),
    (
        "optimizer/adamw",
        "_target_: torch.optim.AdamW\n_partial_: true\nlr: ???",
        "",
        "optimizer.lr: ",
        "give optimizer.lr=",
    ),
    ("optimizer/adamw", "_target_: needy.Optimizer", "", "optimizer._target_: needy.Optimizer ", "no_such_package"),
    ("experiment/mine", "defaults: {modle: mlp}", "experiment=mine", "modle: ", "did you mean model?"),
    ("experiment/mine", "modle: {a: 1}", "experiment=mine", "modle: ", "did you mean model?"),
    ("experiment/mine", "defaults:\n  - override /model: mlp", "experiment=mine", MINE, "write model: mlp, "),
    ("experiment/mine", "defaults:\n  - /model: mlp\n  - _self_", "experiment=mine", MINE, "write model: mlp, "),
    ("experiment/mine", "defaults:\n  - _self_", "experiment=mine", MINE, "leave it out"),
    (
        "experiment/mine",
        "trainer:\n  max_epoch: 3",
        "experiment=mine",
        "trainer.max_epoch: ",
        "did you mean max_epochs?",
    ),
    (
        "logger/csv",
        "csv:\n  _target_: lightning.pytorch.loggers.CSVLogger\n  save_dir: ${runs}\n  api_key: abc",
        "logger=csv",
        "logger.csv.api_key: ",
        "${oc.env:API_KEY}",
    ),
]


def with_file(folder: Path, name: str, contents: str) -> Project:
    """A project with the built-in options, of which one has other contents."""
    configs = shutil.copytree(PROJECT.root / "configs", folder / "configs")
    (configs / f"{name}.yaml").write_text(f"{contents}\n")
    (folder / "needy.py").write_text("import no_such_package\n")
    return Project(folder, None, (configs,))


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Call a command that must be refused; return the lines on standard error."""
    monkeypatch.delenv("BOLTCUTTER_DEBUG", raising=False)

    def call(*overrides: str, project: Project = PROJECT, name: str = "check") -> list[Mistake]:
        with pytest.raises(SystemExit) as stopped:
            dispatch_command(project, COMMANDS[name], None, overrides)
        out, err = capsys.readouterr()
        assert stopped.value.code == 2
        assert not out
        mistakes = getattr(stopped.value.__context__, "mistakes", [])  # of a ConfigError
        kinds = [mistake.kind for mistake in mistakes] or ["invalid_value"] * err.count("\n")
        return [Mistake(line, kind) for line, kind in zip(err.splitlines(), kinds, strict=True)]

    return call


def shown(line: Mistake) -> Mistake:
    return Mistake(line.removeprefix("error: "), line.kind)


def assert_one_line(lines: list[str], setting: str, remedy: str) -> None:
    """Assert that the only line begins with the setting, with its value, and contains the remedy after it."""
    (line,) = lines
    assert line.startswith(f"error: {setting}")
    assert remedy in line.removeprefix(f"error: {setting}")


@pytest.mark.parametrize(("overrides", "setting", "remedy"), MISTAKES)
def test_a_mistake_in_overrides_is_one_line(overrides: str, setting: str, remedy: str, refusal: Refusal) -> None:
    lines = refusal(*shlex.split(overrides))
    assert_one_line(lines, setting, remedy)
    mistake = explain(shown(lines[0]), shlex.split(overrides))
    assert mistake.fix == REPAIRED.get(overrides)
    if overrides not in REPAIRED:
        assert mistake.replaces == (tuple(shlex.split(overrides)[-1:]) if overrides in WITHOUT else ())
    assert setting.startswith(mistake.setting)


def test_programs_can_repair_nine_of_ten_mistakes() -> None:
    assert {*REPAIRED, *WITHOUT, *UNREPAIRED} == {overrides for overrides, _, _ in MISTAKES}
    repaired = [contents for _, contents, *_ in FILES if contents not in FILES_NOT_REPAIRED]
    assert len({*REPAIRED, *WITHOUT}) >= 0.9 * len(MISTAKES)
    assert len({*REPAIRED, *WITHOUT, *repaired}) >= 0.9 * (len(MISTAKES) + len(FILES))


@pytest.mark.parametrize(("name", "contents", "overrides", "setting", "remedy"), FILES)
def test_a_mistake_in_a_file_is_one_line(
    name: str,
    contents: str,
    overrides: str,
    setting: str,
    remedy: str,
    refusal: Refusal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = with_file(tmp_path, name, contents)
    monkeypatch.syspath_prepend(tmp_path)
    lines = refusal(*overrides.split(), project=project)
    assert_one_line([line.replace(f"{tmp_path}/", "") for line in lines], setting, remedy)
    arguments = overrides.split()
    mistake = locate(explain(shown(lines[0]), arguments), project, arguments)
    assert bool(mistake.fix or mistake.replaces) == (contents not in FILES_NOT_REPAIRED)
    if mistake.file:
        assert mistake.file == f"{tmp_path}/configs/{name}.yaml"
        assert mistake.line


def test_each_of_several_mistakes_has_its_line(refusal: Refusal) -> None:
    lines = refusal("seed=a", "test=1", "trainer.max_epoch=3")
    assert sorted(line.split(": ")[1] for line in lines) == ["seed=a", "test=1", "trainer.max_epoch"]


def test_fractions_of_a_split_must_add_up_to_one(refusal: Refusal, tmp_path: Path) -> None:
    overrides = ["data.split=[0.5,0.5,0.5]", f"folder={tmp_path / 'run'}", "logger=null"]
    with restored_signals():
        refused = refusal(*overrides, name="train")
    assert_one_line(refused, "data.split=[0.5, 0.5, 0.5] ", "; try ")
    assert not list(tmp_path.iterdir())


def test_a_command_whose_package_is_not_installed(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command sets
    server = "boltcutter.export.serving.server"
    for module in (server, "boltcutter.export.serving.app"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "prometheus_client.multiprocess", raising=False)
    assert_one_line(refusal(name="serve"), "prometheus_client: ", "pip install 'boltcutter[serve]'")


@pytest.mark.parametrize("override", ["export=[]", "export=null", "ckpt=last"])
def test_an_export_without_formats(override: str, refusal: Refusal) -> None:
    assert_one_line(refusal("run=/nowhere", override, name="export"), "export: ", "give export=…")


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_DEBUG", "1")
    with pytest.raises(ConfigError, match=r"^sed: "):
        dispatch_command(PROJECT, COMMANDS["check"], None, ["sed=1"])


@pytest.mark.parametrize(
    ("name", "argument", "setting", "remedy"),
    [
        ("train", "trainer.max_epoch=2", "trainer.max_epoch: ", "did you mean max_epochs?"),
        ("check", "--chek", "--chek: ", "did you mean --check?"),
    ],
)
def test_a_process_exits_with_status_2(name: str, argument: str, setting: str, remedy: str, script: Script) -> None:
    done = script(name, argument)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr.splitlines(), setting, remedy)


def test_only_one_rank_reports_a_mistake(script: Script) -> None:
    done = script("train", "data.batch_size=63", "trainer.devices=2", "trainer.accelerator=cpu", ranks=2)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert_one_line(lines, "data.batch_size=63 ", "try 64")
    assert "boltcutter/" not in done.stderr


@pytest.mark.slow
def test_a_mistake_is_reported_if_rank_0_is_the_last_to_find_it(torchrun: Script, tmp_path: Path) -> None:
    slow = 'import os, time\ntime.sleep(8 * (os.environ.get("RANK") == "0"))\n'
    (tmp_path / "sitecustomize.py").write_text(slow)
    overrides = ["seed=a", "trainer.devices=2", "trainer.accelerator=cpu"]
    done = torchrun("train", *overrides, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert re.search(r"^error(?: on rank 1)?: seed=a: expected int$", done.stderr, re.M), done.stderr
