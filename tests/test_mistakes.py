"""What a person may get wrong: each mistake is one line, with its setting, and nothing heavy has begun."""

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.cli.main import main
from boltcutter.project import Project

PROJECT = Project.find(__file__)
DDP = "trainer=ddp trainer.accelerator=cpu trainer.devices=2"
FOREIGN = Path(__file__).parent / "foreign" / "configs"
GAN = f"task={FOREIGN}/task/gan.yaml data={FOREIGN}/data/digits.yaml"
STOPPING = "callback=[default,early_stopping]"
Say = Callable[..., list[str]]
Script = Callable[..., subprocess.CompletedProcess[str]]

MISTAKES = [
    # Keys.
    ("foo=1", "foo: no such key; --print shows all"),
    ("+foo=1", "foo: no such key; --print shows all"),
    ("sed=1", "sed: no such key; did you mean seed?"),
    ("lr=1", "lr: no such key; did you mean optimizer.lr?"),
    ("trainr.devices=1", "trainr.devices: no such key; did you mean trainer.devices?"),
    ("trainer.devces=1", "trainer.devces: Trainer takes no such argument; did you mean devices?"),
    ("data.quite=1", "data.quite: Digits takes no such argument; --describe data lists them"),
    ("model=mlp model.hidden_size=[3]", "model.hidden_size: MLP takes no such argument; did you mean hidden_sizes?"),
    ("task.loss=mse", "task.loss: Classification takes no such argument"),
    ("task.optimizer.lrr=1", "optimizer.lrr: AdamW takes no such argument; did you mean lr?"),
    ("optimizer.beta=1", "optimizer.beta: AdamW takes no such argument; did you mean betas?"),
    (
        "scheduler.warmup_rato=1",
        "scheduler.warmup_rato: warmup_cosine takes no such argument; did you mean warmup_ratio?",
    ),
    ("callback.best.save_top=1", "callback.best.save_top: BestCheckpoint takes no such argument; did you mean"),
    ("callback.bst.monitor=x", "callback.bst.monitor: no such key; did you mean callback.best.monitor?"),
    ("task.metrics.f1.averag=macro", "task.metrics.f1: Unexpected keyword arguments: `averag`"),
    # Keywords that a class would hand on without a look.
    (f"{DDP} trainer.strategy.find_unused_parametrs=true", "DDPStrategy takes no such argument; did you mean find_un"),
    ("logger=tensorboard logger.tensorboard.flush_sec=3", "TensorBoardLogger takes no such argument; did you mean fl"),
    ("logger.wandb.entitty=me", "logger.wandb.entitty: WandbLogger takes no such argument; did you mean entity?"),
    ("logger.wandb._target_=lightning.pytorch.loggers.WandbLogger logger.wandb.entitty=me", "did you mean entity?"),
    # Types.
    ("seed=a", "seed=a: expected int"),
    ("seed=1.5", "seed=1.5: expected int"),
    ("seed=true", "seed=true: expected int"),
    ("seed=null", "seed=null: expected int"),
    ("seed='\"3\"'", "seed='3': expected int"),
    ("test=1", "test=1: expected bool"),
    ("report=no", "report=no: expected bool"),
    ("name=null", "name=null: expected str"),
    ("runs=3", "runs=3: expected Path"),
    ("optimizer.lr=fast", "optimizer.lr=fast: expected float | Tensor"),
    ("data.batch_size=64.5", "data.batch_size=64.5: expected int"),
    ("data.batch_size=null", "data.batch_size=null: expected int"),
    ("data.split=0.5", "data.split=0.5: expected tuple[float, float, float]"),
    ("data.split=[0.5,0.5]", "data.split=[0.5,0.5]: expected tuple[float, float, float]"),
    ("model=mlp model.hidden_sizes=3", "model.hidden_sizes=3: expected Sequence[int]"),
    ("model=mlp model.hidden_sizes=32,16", "model.hidden_sizes=32,16: expected Sequence[int]; did you mean [32,16]?"),
    ("model=mlp model.hidden_sizes=[3,a]", "model.hidden_sizes=[3,a]: expected Sequence[int]"),
    ("model=mlp model.dropout=yes", "model.dropout=yes: expected float"),
    ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5: expected int | null"),
    ("task.metrics.f1=3", "task.metrics.f1=3: expected Metric"),
    # One of several.
    ("model=mlp model.activation=rellu", "expected 'relu' | 'gelu' | 'silu' | 'tanh'; did you mean relu?"),
    ("model=resnet model.depth=19", "model.depth=19: expected 18 | 34 | 50"),
    ("task=regression task.loss=mze", "task.loss=mze: expected 'mse' | 'l1' | 'huber'; did you mean mse?"),
    ("task.interval=stepp", "task.interval=stepp: expected 'step' | 'epoch'; did you mean step?"),
    ("task.metrics.f1.average=macroo", "task.metrics.f1.average=macroo: expected 'micro' | 'macro'"),
    ("trainer.precision=bf17", "trainer.precision=bf17: expected "),
    ("logger.wandb.mode=of", "logger.wandb.mode=of: expected 'auto' | 'online' | 'offline' | 'disabled'"),
    ("callback.best.mode=minn", "callback.best.mode=minn: expected 'min' | 'max'; did you mean min?"),
    # Options and groups.
    ("model=nlp", "model=nlp: no such option; did you mean mlp? (there are: "),
    ("model=", "model=: no such option (there are: "),
    ("model=/nowhere/x.yaml", "model=/nowhere/x.yaml: no such option"),
    ("callback=[default,emma]", "callback=emma: no such option; did you mean ema?"),
    ("experiment=[mnist,foo]", "experiment=foo: no such option (there are: "),
    ("modle=mlp", "modle: no such key; did you mean model?"),
    ("~modle", "modle: no such key; did you mean model?"),
    ("model=null", "model=null: expected Module"),
    ("~task", "task=null: expected LightningModule"),
    ("optimizer=null", "task.optimizer=null: expected Callable[..., Optimizer]"),
    ("data=null", "model.input_shape: ${data.shape} refers to nothing"),
    # Calls.
    ("optimizer._target_=torch.optim.Adamm", "optimizer._target_: torch.optim has no Adamm; did you mean Adam?"),
    ("optimizer._target_=torch.optimm.Adam", "optimizer._target_: torch has no optimm; did you mean optim?"),
    ("model._target_=ConvNet", "model._target_: ConvNet: no module named ConvNet; give the full dotted path"),
    ("optimizer._target_=no_such_package.Adam", "no module named no_such_package; give the full dotted path"),
    ("optimizer._target_=torch.pi", "optimizer._target_: torch.pi cannot be called; give the full dotted path"),
    ("optimizer._target_=", "optimizer._target_: '' is not the dotted path of a class"),
    ("model._target_=collections.OrderedDict", "model=collections.OrderedDict: expected Module"),
    (
        "+callback.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
        "callback.mine.scheduling: missing; GradientAccumulationScheduler needs it (dict[int, int])",
    ),
    ("+callback.mine=3", "callback.mine=3: expected Callback | null"),
    # References.
    ("trainer.max_epochs=???", "trainer.max_epochs: not set; give trainer.max_epochs=…"),
    ("seed=???", "seed: not set; give seed=…"),
    ("optimizer.lr=${optimizr.eps}", "optimizer.lr: ${optimizr.eps} refers to nothing"),
    ("optimizer.lr=${oc.env:NO_SUCH_VARIABLE}", "optimizer.lr: environment variable NO_SUCH_VARIABLE is not set"),
    ("optimizer.lr=${oc.envv:X}", "optimizer.lr: Unsupported interpolation type oc.envv"),
    ("name=${name}", "name: Recursive interpolation detected"),
    ("optimizer.lr=${", "optimizer.lr=${: "),
    ("~seed", "data.seed: ${seed} refers to nothing"),
    # Values that a constructor refuses.
    ("seed=-1", "seed=-1 is not in [0, 4294967295]; try 0"),
    ("data.batch_size=-4", "data.batch_size=-4 must be 1 or more; try 64"),
    ("data.num_workers=-1", "data.num_workers=-1 must be 0 or more; try 0"),
    (
        "data.shape=[1,9,9]",
        "data.shape=(1, 9, 9), data.num_classes=10: digits have (1, 8, 8) and 10; keep the defaults",
    ),
    ("model=mlp model.dropout=2", "model.dropout=2.0 is not in [0, 1); try 0.1"),
    ("model=mlp model.hidden_sizes=[]", "model.hidden_sizes=[] has no hidden layer; try model=linear"),
    ("model.input_shape=[3]", "model.input_shape=(3,): ConvNet needs (channels, height, width)"),
    ("task.label_smoothing=2", "task.label_smoothing=2.0 is not in [0, 1); try 0.1"),
    ("task.l1=-1", "task.l1=-1.0 would reward large weights; give 0 or more"),
    ("optimizer.lr=-1", "optimizer: Invalid learning rate: -1"),
    ("scheduler.warmup_ratio=2", "scheduler.warmup_ratio=2.0 is not in [0, 1); try 0.05"),
    ("scheduler=onecycle scheduler.pct_start=2", "scheduler: Expected float between 0 and 1 pct_start, but got 2.0"),
    ("trainer.max_epochs=-3", "trainer: `max_epochs` must be a non-negative integer or -1. You passed in -3."),
    ("trainer.limit_train_batches=-2", "trainer: You have passed invalid value -2 for limit_train_batches"),
    (
        "callback.best.every_n_epochs=0 callback.best.every_n_train_steps=2 callback.best.train_time_interval=3",
        "callback.best: Combination of parameters",
    ),
    # Devices.
    ("trainer.accelerator=gpuu", "trainer: You selected an invalid accelerator name: `accelerator='gpuu'`. Available"),
    ("trainer.strategy=ddpp", "trainer: You selected an invalid strategy name: `strategy='ddpp'`. It must be"),
    ("trainer.devices=0", "trainer.devices=0 is not a number of devices; try trainer.devices=1"),
    ("trainer.devices=-3", "trainer.devices=-3 is not a number of devices"),
    ("trainer.devices=two", "trainer.devices=two is not a number of devices"),
    ("trainer.devices=999", "trainer.devices=999: this machine has "),
    (
        "trainer.accelerator=cuda trainer.devices=999",
        "trainer.accelerator=cuda, trainer.devices=999: this machine has ",
    ),
    ("trainer.accelerator=cpu trainer.devices=3", "data.batch_size=64 does not divide over 3 ranks; try 66"),
    # What does not go together.
    (
        "task.metrics.f1.num_classes=3",
        "task.metrics.f1.num_classes=3, but data.num_classes=10; set task.metrics.f1.num_cl",
    ),
    (
        "task=regression",
        "task=regression expects regression data, but data=digits is classification data; try task=classification",
    ),
    (
        "data=synthetic data.kind=regression",
        "expects classification data, but data=synthetic is regression data; try task=regression",
    ),
    (
        "experiment=diabetes model=convnet ~model.hidden_sizes",
        "model.input_shape=(10,): ConvNet needs (channels, height, width)",
    ),
    ("callback.best.monitor=val/acc", "callback.best.monitor=val/acc is never logged; did you mean val/accuracy?"),
    (f"{STOPPING} callback.early_stopping.monitor=val/los", "callback.early_stopping.monitor=val/los is never logged;"),
    ("task.monitor=val/los", "task.monitor=val/los is never logged; did you mean val/loss?"),
    ("trainer.logger=false", "trainer.logger: set by logger; use logger=… instead"),
    ("trainer.callbacks=[]", "trainer.callbacks: set by callback; use callback=… instead"),
    # A module that brings its own model and optimizer.
    (
        f"{GAN} model=mlp",
        "model=mlp: nothing refers to model, so it would have no effect; leave it out, or refer to it",
    ),
    (f"{GAN} optimizer.lr=0.1", "optimizer.lr=0.1: nothing refers to optimizer"),
    (f"task={FOREIGN}/task/gan.yaml data=null", "data=null: task=gan has no train_dataloader; choose data=…"),
    ("task._target_=pathlib.Path", "task=pathlib.Path: expected LightningModule"),
    (f"{GAN} task._target_=foreign.libraries.tinynet", "task._target_=foreign.libraries.tinynet: expected a lightning"),
    # Secrets.
    ("+logger.wandb.api_key=abc", "logger.wandb.api_key: a secret must not be stored with the run; write"),
    ("+password=1234", "password: a secret must not be stored with the run"),
    # Earlier runs.
    ("resume=/nowhere", "resume=/nowhere: no run there"),
    ("reproduce=/tmp", "reproduce=/tmp: no run there"),
    ("resume=/tmp reproduce=/tmp", "resume and reproduce exclude each other; give one of them"),
    # Words.
    ("''", "'': not a valid override; say group=option, key=value, +key=value or ~key"),
    ("~", "~: not a valid override; say "),
    ("+", "+: not a valid override; say "),
    ("=1", "=1: not a valid override; say "),
    ("seed", "seed: not a valid override; say "),
    ("~seed=1", "~seed=1: not a valid override; say ~seed"),
    ("~foo", "foo: no such key"),
    ("model=[mlp", "model: cannot read [mlp; quote the word for the shell"),
    ("--chek", "--chek: no such flag; did you mean --check? (there are: "),
    ("--check --foo", "--foo: no such flag (there are: "),
    ("--check --print", "--print: cannot go with --check; give one of them"),
    ("--describe trainer.max_epoch", "trainer.max_epoch: no such key; did you mean trainer.max_epochs?"),
]
FILES = [
    ("model/mlp", "hidden: [1", "model=mlp", "configs/model/mlp.yaml:2: not valid YAML: "),
    ("model/mlp", "a: 1\n\tb: 2", "model=mlp", "configs/model/mlp.yaml:2: not valid YAML: "),
    ("model/mlp", "a: 1\na: 2", "model=mlp", "configs/model/mlp.yaml:2: not valid YAML: found duplicate key a"),
    ("model/mlp", "- 1", "model=mlp", "configs/model/mlp.yaml: expected keys with values, found a list"),
    ("model/mlp", "a: ${b", "model=mlp", "configs/model/mlp.yaml: "),
    ("model/mlp", "defaults: mlp", "model=mlp", "configs/model/mlp.yaml: inherits from itself; correct its defaults"),
    ("model/mlp", "hidden: [3]", "model=mlp", "model={hidden: [3]}: expected Module"),
    ("optimizer/adamw", "_target_: torch.optim.AdamW\nlr: 1", "", "optimizer.params: missing; AdamW needs it"),
    (
        "optimizer/adamw",
        "_target_: torch.optim.AdamW\n_partial_: true\nlr: ???",
        "",
        "optimizer.lr: not set; give optim",
    ),
    (
        "optimizer/adamw",
        "_target_: needy.Optimizer",
        "",
        "needy.Optimizer needs no_such_package, which is not installed",
    ),
    ("experiment/mine", "defaults: {modle: mlp}", "experiment=mine", "modle: no such group; did you mean model?"),
    ("experiment/mine", "modle: {a: 1}", "experiment=mine", "modle: no such key; did you mean model?"),
    (
        "experiment/mine",
        "defaults:\n  - override /model: mlp",
        "experiment=mine",
        "mine.yaml: '- override /model: mlp' is Hydra's syntax; write model: mlp, without the dash",
    ),
    (
        "experiment/mine",
        "defaults:\n  - /model: mlp\n  - _self_",
        "experiment=mine",
        "'- /model: mlp' is Hydra's syntax; write model: mlp, without the dash",
    ),
    ("experiment/mine", "defaults:\n  - _self_", "experiment=mine", "'- _self_' is Hydra's syntax; leave it out"),
    ("experiment/mine", "trainer:\n  max_epoch: 3", "experiment=mine", "trainer.max_epoch: Trainer takes no such"),
    ("logger/csv", "api_key: abc", "logger=csv", "logger.api_key: a secret must not be stored with the run"),
]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """What is said of words, a line for each mistake."""
    monkeypatch.delenv("BOLTCUTTER_DEBUG", raising=False)

    def call(*words: str, project: Project = PROJECT, module: str = "boltcutter.assembly.assemble") -> list[str]:
        with pytest.raises(SystemExit) as left:
            main(project, module, "", words)
        out, err = capsys.readouterr()
        assert left.value.code == 2
        assert not out
        return err.splitlines()

    return call


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_a_mistake_in_words(words: str, text: str, say: Say) -> None:
    lines = say(*shlex.split(words))
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert text in lines[0]


@pytest.mark.parametrize(("name", "contents", "words", "text"), FILES)
def test_a_mistake_in_a_file(
    name: str, contents: str, words: str, text: str, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = shutil.copytree(PROJECT.root / "configs", tmp_path / "configs")
    (configs / f"{name}.yaml").write_text(f"{contents}\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = say(*words.split(), project=Project(tmp_path, None, (configs,)))
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert text in lines[0]


def test_each_of_several_mistakes_has_its_line(say: Say) -> None:
    assert set(say("seed=a", "test=1", "trainer.max_epoch=3")) == {
        "error: seed=a: expected int",
        "error: test=1: expected bool",
        "error: trainer.max_epoch: Trainer takes no such argument; did you mean max_epochs?",
    }


def test_a_split_that_does_not_add_up(say: Say, tmp_path: Path) -> None:
    words = ["data.split=[0.5,0.5,0.5]", f"folder={tmp_path / 'run'}", "logger=null"]
    (line,) = say(*words, module="boltcutter.training.train")
    assert line.startswith("error: data.split=[0.5, 0.5, 0.5] must be three positive fractions that add up to 1; try ")
    assert not list(tmp_path.iterdir())


def test_a_traceback_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_DEBUG", "1")
    with pytest.raises(Exception, match="sed: no such key"):
        main(PROJECT, "boltcutter.assembly.assemble", "", ["sed=1"])


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("train", "trainer.max_epoch=2", "trainer.max_epoch: Trainer takes no such argument; did you mean max_epochs?"),
        ("check", "--chek", "--chek: no such flag; did you mean --check?"),
    ],
)
def test_a_real_process(name: str, words: str, text: str, script: Script) -> None:
    done = script(name, words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {text}")
    assert done.stderr.count("\n") == 1


def test_one_rank_speaks_for_all(script: Script) -> None:
    done = script("train", "data.batch_size=63", "trainer.devices=2", "trainer.accelerator=cpu", ranks=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines == ["error: data.batch_size=63 does not divide over 2 ranks; try 64"]
    assert "boltcutter/" not in done.stderr
    assert done.returncode
