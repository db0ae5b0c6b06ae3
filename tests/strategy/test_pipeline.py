import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import QUICK, Script, assert_same, assert_same_history, max_difference
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.pipeline import LocalStage, PipelineStrategy
from boltcutter.task.classification import Classification
from boltcutter.topology import PlannedTraining, Topology

# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
PIPELINE = ["trainer=pipeline", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def staged(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two stages."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    done = script("train", *OVERRIDES, *PIPELINE, "trainer.devices=2", f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_stages_train_and_test_as_one_process(reference: Path, staged: Path) -> None:
    assert_same(reference, staged)


def test_logged_values_are_those_of_one_process(reference: Path, staged: Path) -> None:
    assert_same_history(reference, staged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([*PIPELINE, "trainer.devices=2"], ["trainer=default", "trainer.accelerator=cpu"]),
        (["trainer.devices=1"], [*PIPELINE, "trainer.devices=2"]),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=3"], marks=pytest.mark.slow),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=1"], marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_number_of_stages(
    script: Script, reference: Path, tmp_path: Path, first: list[str], then: list[str]
) -> None:
    def ranks(overrides: list[str]) -> int:
        return next((int(override[-1]) for override in overrides if override.startswith("trainer.devices=")), 1)

    done = script(
        "train", *OVERRIDES, *first, "trainer.max_epochs=1", "test=false", f"folder={tmp_path}", ranks=ranks(first)
    )
    assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}", *then, "trainer.max_epochs=2", ranks=ranks(then))
    assert done.returncode == 0, done.stderr
    assert max_difference(reference, tmp_path) < 1e-6


@pytest.mark.slow
def test_an_epoch_resumed_in_one_process_counts_each_sample_once(
    script: Script, reference: Path, tmp_path: Path
) -> None:
    overrides = [*OVERRIDES, *PIPELINE, "trainer.devices=2", "trainer.max_steps=10", f"folder={tmp_path}", "test=false"]
    often = ["callback.last.every_n_epochs=null", "+callback.last.every_n_train_steps=10"]
    done = script("train", *overrides, *often, ranks=2)
    assert done.returncode == 0, done.stderr
    more = ["trainer=default", "trainer.accelerator=cpu", "trainer.max_steps=-1", "trainer.max_epochs=1"]
    done = script("train", f"resume={tmp_path}", *more)
    assert done.returncode == 0, done.stderr
    ours, theirs = (pd.read_csv(run / "metrics.csv")["train/accuracy"].dropna() for run in (tmp_path, reference))
    assert ours.iloc[-1] == pytest.approx(theirs.iloc[0])


COUNTER = """
import json
from pathlib import Path

import lightning as L
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Traffic(L.Callback):
    \"\"\"Count the bytes of tensors that this rank passes to collectives, in the last step of each kind.\"\"\"

    def setup(self, trainer, task, stage):
        self.bytes = {}

    def start(self, *args):
        self.mode = Count()
        self.mode.__enter__()

    def end(self, trainer, task, outputs, batch, batch_idx):
        self.mode.__exit__(None, None, None)
        self.bytes["train" if trainer.training else "val"] = self.mode.total, len(batch[0])

    on_train_batch_start = on_validation_batch_start = start
    on_train_batch_end = on_validation_batch_end = end

    def on_fit_end(self, trainer, task):
        if trainer.world_size > 1:
            Path(trainer.default_root_dir, f"{trainer.global_rank}.json").write_text(json.dumps(self.bytes))


class Count(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            found = [leaf for leaf in tree_flatten((args, kwargs))[0] if hasattr(leaf, "nbytes")]
            self.total += sum(tensor.nbytes for tensor in found)
        return function(*args, **kwargs or {})
"""


@pytest.fixture(scope="module")
def language_models(script: Script, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a language model with tied embeddings in one process, and on two stages."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "traffic.py").write_text(COUNTER)
    accumulated = ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"]
    logged = [
        "trainer.val_check_interval=2",
        "trainer.log_every_n_steps=1",
        "+callback.traffic._target_=traffic.Traffic",
    ]
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2", "model.activation_checkpointing=true"])):
        overrides = [*OVERRIDES, *text, *accumulated, *logged, *more, f"folder={folder}/{name}"]
        done = script("train", *overrides, ranks=2 if more else 0, env={"PYTHONPATH": str(folder)})
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_language_model_with_tied_embeddings_trains_as_one_process(language_models: Path) -> None:
    assert max_difference(language_models / "one", language_models / "two") < 1e-6
    assert_same_history(language_models / "one", language_models / "two")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_outputs_that_the_steps_do_not_need_are_not_communicated(language_models: Path, rank: int) -> None:
    found = json.loads((language_models / "two" / f"{rank}.json").read_text())
    for kind, copies in (("train", 2), ("val", 1)):  # hidden states, and their gradients
        communicated, samples = found[kind]
        logits, hidden = (samples * 16 * size * 4 for size in (256, 32))
        shared = 256 * 32 * 4 if kind == "train" else 0  # gradient of the tied embedding
        assert 0 < communicated - copies * hidden - shared < logits / 10


def test_a_non_finite_gradient_stops_all_ranks(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *PIPELINE, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count(": the gradient of model.hidden.0.weight") == 2


FROZEN = """
from boltcutter.model.mlp import MLP
from boltcutter.topology import PlannedTraining

class Frozen(MLP):
    def __init__(self, stage: int) -> None:
        super().__init__((1, 8, 8), 10, hidden_sizes=[32])
        self.stages(2)[stage].requires_grad_(False)
"""


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.slow
def test_a_frozen_stage_trains_as_in_one_process(script: Script, tmp_path: Path, stage: int) -> None:
    (tmp_path / "frozen_stage.py").write_text(FROZEN)
    overrides = [*OVERRIDES, "~model", "+model._target_=frozen_stage.Frozen", f"+model.stage={stage}", "name=frozen"]
    overrides += ["trainer.max_steps=5", "test=false", "trainer.gradient_clip_val=0.01", "timeout=30"]
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2"])):
        env = {"PYTHONPATH": str(tmp_path)}
        done = script("train", *overrides, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0, env=env)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def task(model: nn.Module | None = None, **options: Any) -> Classification:
    return Classification(model or MLP((6,), 3, hidden_sizes=[5]), optimizer=torch.optim.SGD, **options)


@pytest.mark.parametrize(
    ("given", "planned", "text"),
    [
        (task(l1=0.1), {}, "task.l1, task.l2: .*; set optimizer.weight_decay"),
        (
            task(MLP((6,), 3, hidden_sizes=[5], norm="batchnorm")),
            {},
            "model.norm=batchnorm: .*; use another norm",
        ),
        (task(ConvNet((1, 8, 8), 3)), {}, "ConvNet has no method stages"),
        (task(), {"callbacks": [WeightAveraging()]}, r"callback: .*; use callback=\[default,ema\]"),
        (task(), {"precision": "16-mixed"}, "trainer.precision=16-mixed: .*; try bf16-mixed"),
        (task(), {"batch_size": 6}, "data.batch_size=6 does not divide .* try .*=8$"),
    ],
)
def test_unsupported_features_are_refused(given: Classification, planned: dict[str, Any], text: str) -> None:
    strategy = PipelineStrategy()
    plain: dict[str, Any] = {"precision": "32-true", "callbacks": []}
    plan = PlannedTraining(given, Topology(1, 2, 2, 2, 1), strategy, **plain | planned)
    assert any(re.search(text, found) for found in strategy.refuses_training(plan)), [*strategy.refuses_training(plan)]


def test_zero_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.strategy\.num_microbatches=0 is not positive; try 4"):
        PipelineStrategy(0)


def test_a_loss_other_than_the_mean_of_losses_is_refused() -> None:
    strategy = PipelineStrategy()
    strategy._check_loss(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(StrategyError, match=r"another loss than the mean of task\.losses; use trainer=ddp"):
        strategy._check_loss(torch.tensor(2.0), torch.tensor(1.0))


def test_losses_that_differ_by_their_rounding_are_accepted() -> None:
    strategy, expected = PipelineStrategy(), torch.tensor(2.2969, dtype=torch.bfloat16)
    strategy._check_loss(torch.tensor(2.3125, dtype=torch.bfloat16), expected)  # the next larger number
    with pytest.raises(StrategyError, match="another loss"):
        strategy._check_loss(torch.tensor(2.5, dtype=torch.bfloat16), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.strategy.num_microbatches=1"],
            "error: trainer.strategy.num_microbatches=1: fewer than the 2 stages; try 4",
        ),
        (["task.compile=true"], "task.compile=true: stages are not compiled; set it to false"),
    ],
)
def test_unsupported_overrides_are_refused_before_ranks_start(
    script: Script, tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = script("train", *OVERRIDES, *PIPELINE, "trainer.devices=2", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_give_the_weights_of_one_process(
    script: Script, reference: Path, tmp_path: Path, precision: str
) -> None:
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2"])):
        overrides = [*OVERRIDES, *more, f"trainer.precision={precision}", "trainer.max_steps=5", "test=false"]
        done = script("train", *overrides, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < (1e-9 if precision == "64-true" else 5e-3)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_sequence_equal_the_model(tied: bool, count: int) -> None:
    model = GPT((8,), 11, num_layers=3, hidden_size=16, num_heads=2, tie_embeddings=tied, position="learned")
    x = torch.randint(4, (7, 6))
    y: Tensor = x
    for stage in model.stages(count):
        assert any(True for _ in stage.parameters())
        y = stage(y)
    assert torch.equal(y, model(x))


def test_a_rank_keeps_only_its_own_parameters_but_all_names() -> None:
    models = [MLP((6,), 3, hidden_sizes=[5, 5, 5]) for _ in range(2)]
    first, last = (LocalStage(model, rank, 2) for rank, model in enumerate(models))
    names = [name for name, _ in models[0].named_parameters()]
    kept = [{name for name, p in model.named_parameters() if not p.is_meta} for model in models]
    assert kept[0] | kept[1] == set(names)
    assert not kept[0] & kept[1]
    assert [p.shape for p in models[0].parameters()] == [p.shape for p in models[1].parameters()]
    for model, stage in zip(models, (first, last), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        stage.module(torch.randn(2, 6 if stage.first else 5)).sum().backward()
        optimizer.step()
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(names)
        assert len(optimizer.state) == len(stage.weights) == 4


class Incomplete(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def stages(self, count: int) -> list[nn.Module]:
        return [self.used] * count

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.unused(self.used(x))
        return output


def test_models_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"no stage of Incomplete has unused\.weight; add it to one"):
        LocalStage(Incomplete(), 0, 1)
    with pytest.raises(StrategyError, match=r"trainer\.devices=3 exceeds .*model=mlp.* try trainer.devices=2"):
        LocalStage(MLP((6,), 3, hidden_sizes=[5]), 0, 3)
    with pytest.raises(
        StrategyError, match=r"trainer\.devices=3 exceeds model\.num_layers=2, .* try trainer.devices=2"
    ):
        LocalStage(GPT((8,), 11, num_layers=2, hidden_size=16, num_heads=2), 0, 3)
