"""Whole steps as CUDA graphs, which ``emulated_graphs`` emulates on the CPU."""

import gc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import ROOT, saved_weights
from emulated_graphs import EmulatedGraphs, Graph, KeepsWeights
from fake_gpu import fake_gpu
from torch import Tensor, nn

import boltcutter
from boltcutter.callback.guard import Guard, NonFiniteGradientError
from boltcutter.run.ledger import first_difference, read_ledgers
from boltcutter.task import base, cuda_graph

SETTING = "task.compile=cuda-graph"
COMMON = [
    "logger=csv",
    "report=false",
    "test=false",
    "trainer.accelerator=cpu",
    "data=digits",
    "trainer.log_every_n_steps=3",
]
COMMON += ["+callback.keeps={_target_: emulated_graphs.KeepsWeights}"]
MLP = ["model=mlp", "model.dropout=0.2"]
SHORT = ["data=all_digits", "data.batch_size=60", "trainer.max_epochs=3"]  # 21 batches, the last of 57
CLIPPED_BY_VALUE = ["trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"]
CLIPPED_BY_VALUE += ["trainer.val_check_interval=0.5"]

PROJECT: list[Path] = []

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:task.compile=cuda-graph")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "forbids_graphs", lambda trainer, **_: None)
    monkeypatch.setattr(cuda_graph, "CudaGraphs", EmulatedGraphs)


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the classes of ``emulated_graphs`` as options."""
    folder = tmp_path_factory.mktemp("project")
    for group, option, names in (
        ("model", "mlp", ("Poisoned", "Waits", "DrawsInPython", "Counts", "ReplacesBuffer")),
        ("task", "classification", ("LogsInStep", "ChangesRate")),
        ("data", "digits", ("AllDigits", "MarkedDigits", "OddDigits", "AnySize")),
    ):
        (folder / "configs" / group).mkdir(parents=True)
        text = (ROOT / "configs" / group / f"{option}.yaml").read_text()
        for name in names:
            file = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            changed = re.sub(r"_target_: boltcutter.*", f"_target_: emulated_graphs.{name}", text, count=1)
            (folder / "configs" / group / f"{file}.yaml").write_text(changed)
    PROJECT.append(folder)
    yield folder
    PROJECT.clear()


def train(folder: Path, *overrides: str) -> cuda_graph.CapturedSteps | None:
    """Train in this process; return what has replayed steps."""
    EmulatedGraphs.made.clear()
    boltcutter.train(*COMMON, *overrides, f"folder={folder}", project=PROJECT[0])
    return KeepsWeights.steps


def assert_identical(one: Path, other: Path) -> None:
    """Assert that two runs have the same bits of weights, of what the ledger has of each step, and of metrics."""
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    (ledger,), (second,) = read_ledgers(one), read_ledgers(other)
    assert first_difference(ledger, second) is None
    tables = [pd.read_csv(run / "metrics.csv").filter(regex="^(?!throughput/|recompiles)") for run in (one, other)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.parametrize(
    ("overrides", "graphs", "replayed"),
    [
        # Steps 1 to 4, 8, 32, the last one, and the last batch of each epoch are not replayed.
        pytest.param(["trainer.gradient_clip_val=0.3"], 1, 54, id="AdamW"),
        pytest.param(
            ["optimizer=sgd", "trainer.gradient_clip_val=0.3", "optimizer.lr=0.02"],
            1,
            54,
            id="SGD",
            marks=pytest.mark.slow,
        ),
        pytest.param(["trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.3"], 3, None, id="accumulated"),
        pytest.param(
            ["trainer.accumulate_grad_batches=3", "data=odd_digits"], 3, None, id="accumulated, of two shapes"
        ),
        pytest.param(
            ["trainer.accumulate_grad_batches=3", "data=digits", "optimizer=sgd"], 3, None, id="partly accumulated"
        ),
        pytest.param(
            ["callback=[default,ema]", "trainer.precision=bf16-mixed"],
            1,
            54,
            id="EMA and bfloat16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["callback.guard=null", "trainer.gradient_clip_val=0.3"], 1, 54, id="without guard", marks=pytest.mark.slow
        ),
        pytest.param(
            ["scheduler=onecycle", "+scheduler.cycle_momentum=false", "task.l2=1e-3", *CLIPPED_BY_VALUE],
            *(1, 54),
            id="clipped by value",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["model=convnet", "~model.dropout", "optimizer=sgd"], 1, 54, id="BatchNorm", marks=pytest.mark.slow
        ),
        pytest.param(
            ["+callback.freezes={_target_: emulated_graphs.FreezesLater}", "optimizer=adam"], 3, None, id="frozen later"
        ),
    ],
)
@pytest.mark.usefixtures("emulated")
def test_captured_training_is_bitwise_identical(
    tmp_path: Path, overrides: list[str], graphs: int, replayed: int | None
) -> None:
    train(tmp_path / "eager", *MLP, *SHORT, *overrides)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SETTING)
        steps = train(tmp_path / "captured", *MLP, *SHORT, *overrides, SETTING)
    assert_identical(tmp_path / "eager", tmp_path / "captured")
    assert steps is not None
    assert len(EmulatedGraphs.made) == graphs
    assert steps.num_replayed == sum(graph.num_replays for graph in EmulatedGraphs.made)
    if replayed:
        assert steps.num_replayed == replayed
    assert steps.num_replayed > 20


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_language_modeling(tmp_path: Path) -> None:
    """Its steps update a metric themselves."""
    overrides = [
        "data=text",
        "task=language",
        "model=gpt",
        "model.num_layers=1",
        "data.shape=[32]",
        "model.dropout=0.1",
    ]
    overrides += ["trainer.max_epochs=1", "trainer.max_steps=24", "trainer.limit_val_batches=2", "data.batch_size=8"]
    train(tmp_path / "eager", *overrides)
    steps = train(tmp_path / "captured", *overrides, SETTING)
    assert_identical(tmp_path / "eager", tmp_path / "captured")
    assert steps is not None
    assert steps.num_replayed > 15


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([], marks=pytest.mark.slow), ["trainer.accumulate_grad_batches=3"]],
    ids=["", "accumulated"],
)
@pytest.mark.usefixtures("emulated")
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(tmp_path: Path, overrides: list[str]) -> None:
    stops = "+callback.stops={_target_: emulated_graphs.StopsOnce, step: 11}"
    train(tmp_path / "whole", *MLP, *SHORT, *overrides, SETTING)
    with pytest.raises(SystemExit):
        train(tmp_path / "resumed", *MLP, *SHORT, *overrides, SETTING, stops)
    boltcutter.train(f"resume={tmp_path / 'resumed'}", project=PROJECT[0])
    assert KeepsWeights.steps.num_replayed > 8
    assert_identical(tmp_path / "whole", tmp_path / "resumed")


POISONED = ["model=poisoned", *SHORT, "data=marked_digits"]
POISONED += ["trainer.gradient_clip_val=null"]  # a CPU does not scale by a norm that is NaN, but a GPU does


@pytest.mark.usefixtures("emulated")
def test_a_step_with_non_finite_gradients_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "_can_defer", lambda *_: True)  # as on CUDA
    found = []
    for name, setting in (("eager", "task.compile=false"), ("captured", SETTING)):
        with pytest.warns(UserWarning, match="skipping step") as caught:
            train(tmp_path / name, *POISONED, "callback.guard.max_skipped_steps=1", setting)
        found.append([str(each.message) for each in caught if "skipping step" in str(each.message)])
    assert found[0] == found[1]
    assert len(found[0]) == 3  # the marked image is in one batch of each epoch
    assert_identical(tmp_path / "eager", tmp_path / "captured")


@pytest.mark.usefixtures("emulated")
def test_training_stops_with_the_weights_before_non_finite_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "_can_defer", lambda *_: True)
    found = []
    for name, setting in (("eager", "task.compile=false"), ("captured", SETTING)):
        with pytest.raises(NonFiniteGradientError) as error:
            train(tmp_path / name, *POISONED, setting)
        batch = torch.load(tmp_path / name / "nonfinite-rank-0.pt")
        found.append((str(error.value).replace(name, ""), KeepsWeights.weights, batch))
    (text, weights, batch), (second_text, second_weights, second_batch) = found
    assert text == second_text  # which names the step and the batch
    assert KeepsWeights.steps.num_replayed > 0
    assert all(torch.equal(weights[name], second_weights[name]) for name in weights)
    assert all(map(torch.equal, batch, second_batch))


@pytest.mark.slow
def test_a_learning_rate_of_float32_only_rounds(
    tmp_path: Path, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "eager", *MLP, *SHORT)
    monkeypatch.setattr(EmulatedGraphs, "rate_dtype", torch.float32)
    train(tmp_path / "captured", *MLP, *SHORT, SETTING)
    a, b = saved_weights(tmp_path / "eager"), saved_weights(tmp_path / "captured")
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-4
    # Steps that are not replayed round alike.
    monkeypatch.setattr(cuda_graph, "WARM_UP", 1000)
    train(tmp_path / "eager in this setting", *MLP, *SHORT, SETTING)
    assert_identical(tmp_path / "captured", tmp_path / "eager in this setting")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model=waits"], "capturing"),
        pytest.param(["model=draws_in_python"], "Python's generator", marks=pytest.mark.slow),
        pytest.param(["model=counts"], "Counts.model.calls", marks=pytest.mark.slow),
        (["model=replaces_buffer"], "ReplacesBuffer.model.mean"),
        (["task=logs_in_step"], "train/spread"),
        pytest.param(["task=changes_rate"], "ChangesRate.optimizer_step", marks=pytest.mark.slow),
        (["+callback.reads={_target_: emulated_graphs.ReadsGradients}"], "ReadsGradients.on_after_backward"),
        pytest.param(["optimizer.fused=null"], "AdamW", marks=pytest.mark.slow),
        (["scheduler=onecycle"], "optimizer.betas"),
        (["data=any_size"], "shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("emulated")
def test_what_forbids_captures_is_one_line(
    tmp_path: Path, overrides: list[str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_OTHER_SHAPES", 3)
    overrides = [*SHORT, "trainer.max_epochs=1", *overrides]
    overrides = overrides if any(each.startswith("model=") for each in overrides) else [*MLP, *overrides]
    train(tmp_path / "eager", *overrides)
    with pytest.warns(UserWarning, match=SETTING) as caught:
        train(tmp_path / "captured", *overrides, SETTING)
    (line,) = [str(each.message) for each in caught if SETTING in str(each.message)]
    assert part in line
    assert "\n" not in line
    assert_identical(tmp_path / "eager", tmp_path / "captured")


def test_without_a_gpu_a_line_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{SETTING}: .*cpu"):
        assert train(tmp_path / "run", *MLP, *SHORT, "trainer.max_epochs=1", SETTING) is None


@pytest.mark.filterwarnings("ignore")
def test_no_replay_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there, where the guard learns of a step one step later."""
    monkeypatch.setattr(cuda_graph, "CudaGraphs", EmulatedGraphs)
    device = ["trainer.strategy={_target_: fake_gpu.FakeStrategy}", "+callback.steps={_target_: fake_gpu.CountSteps}"]
    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=24", "trainer.limit_val_batches=1"]
        steps = train(tmp_path / "run", "model=mlp", "data.batch_size=20", *limits, *device, SETTING)
    assert steps is not None
    assert steps.num_replayed == 18  # not steps 1 to 4, 8, and the last one
    assert gpu.waits
    logged, looked_at = {2, 5, 8, 11, 14, 17, 20, 23}, {0, 1, 3, 7, 23}
    assert [place for step, place in gpu.waits if step >= 0 and step not in logged | looked_at] == []


# What CUDA does, without CUDA


class Recorded:
    """Stands for objects and functions of ``torch.cuda``: records their calls by name."""

    def __init__(self, log: list[str], name: str, **results: Any) -> None:
        self.log, self.name, self.results = log, name, results

    def __getattr__(self, name: str) -> Any:
        return Recorded(self.log, name, **self.results)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.log.append(self.name)
        if isinstance(error := self.results.get(self.name), Exception):
            raise error
        return self

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: Any) -> None:
        self.log.append(f"exit {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    log, results = list[str](), dict[str, Any]()
    for name in ("Stream", "CUDAGraph", "stream", "current_stream", "synchronize", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Recorded(log, name, **results))
    made = Recorded(log, "CUDAGraph")
    made.results = results
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Recorded(log, "generator"),))
    monkeypatch.setattr(torch, "Generator", Recorded(log, "Generator"))
    return log, results


def test_a_capture_is_ended_and_its_stream_left(cuda: Any) -> None:
    log, _ = cuda
    graph, output = cuda_graph.CudaGraphs(torch.device("cuda", 0)).capture(lambda: log.append("step") or 1)
    assert output == 1
    assert log[log.index("capture_begin") :][:3] == ["capture_begin", "step", "capture_end"]
    assert log[-2:] == ["exit stream", "wait_stream"]
    assert "graphsafe_set_state" not in log
    graph.replay()
    assert log[-1] == "replay"


def test_a_capture_that_fails_leaves_stream_and_generator(cuda: Any) -> None:
    log, results = cuda
    results["capture_end"] = RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def step() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_graph.CudaGraphs(torch.device("cuda", 0)).capture(step)
    assert log.count("capture_end") == 1
    assert {"graphsafe_set_state", "set_state", "exit stream"} <= {*log[log.index("capture_end") :]}


def test_waits_are_found_by_the_warnings_of_torch(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    graphs, found = cuda_graph.CudaGraphs(torch.device("cuda", 0)), list[str]()

    def step() -> None:
        with graphs.find_waits(found):
            for text in ("called a synchronizing CUDA operation", "of another kind", "Synchronization debug mode is"):
                warnings.warn(text, stacklevel=1)

    with pytest.warns(UserWarning, match="of another kind"):
        step()
    assert modes == [0, "warn", 0]
    (place,) = found
    assert place.startswith("test_cuda_graph.py:")


# The emulation


def captured(function: Any) -> Graph:
    graph = Graph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        function()
    finally:
        graph.capture_end()
    return graph


def test_a_capture_changes_nothing_and_a_replay_reads_and_writes_the_same_memory() -> None:
    layer, inputs = nn.Linear(2, 1), torch.ones(3, 2)
    before, kept = layer.weight.detach().clone(), dict[str, Tensor]()
    torch.manual_seed(0)

    def step() -> None:
        layer.weight.grad = None
        kept["noise"] = torch.rand(3)
        layer(inputs).sum().backward()
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad

    graph = captured(step)
    assert torch.equal(layer.weight, before)
    assert not kept["noise"].le(1).any()  # not computed yet
    assert float(torch.rand(1)) == pytest.approx(0.4963, abs=1e-4)  # the first number of this seed
    inputs.fill_(2.0)
    gc.collect()
    graph.replay()
    assert torch.allclose(layer.weight, before - 0.1 * 6)
    first = kept["noise"].clone()
    graph.replay()
    assert torch.allclose(layer.weight, before - 0.2 * 6)
    assert not torch.equal(kept["noise"], first)


@pytest.mark.parametrize(
    "function",
    [torch.nonzero, Tensor.item, Tensor.tolist, Tensor.cpu, lambda values: values.to("cpu"), Tensor.numpy, bool],
)
def test_what_waits_for_the_device_fails_in_a_capture(function: Any) -> None:
    with pytest.raises(RuntimeError, match="capturing"):
        captured(lambda: function(torch.ones(())))
