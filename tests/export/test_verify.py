import json
import math
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boltcutter.export import runner
from boltcutter.export import verify as module
from boltcutter.export.command import check_drop
from boltcutter.export.formats import SafeTensors, TorchExport
from boltcutter.export.program import Inputs, Program, TaskProgram
from boltcutter.export.settings import ExportError
from boltcutter.export.verify import (
    Metric,
    Process,
    Reference,
    Result,
    check_cache,
    infer_kind,
    largest_difference,
    verify,
)
from boltcutter.model.gpt import GPT
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling


def test_accuracy_drops_by_points() -> None:
    metric = Metric("classification")
    outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    for part in (slice(0, 3), slice(3, 4)):
        metric.update(outputs[part], torch.tensor([0, 1, 1, 1])[part], outputs[part])
    assert (metric.name, metric.value) == ("accuracy", 0.75)
    assert metric.drop(0.8) == pytest.approx(5.0)


def test_a_metric_without_samples_is_nan() -> None:
    assert math.isnan(Metric("classification").value)
    assert math.isnan(Metric("regression").value)


def test_other_metrics_drop_by_percent() -> None:
    metric = Metric("regression")
    metric.update(torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [5.0]]), torch.zeros(2, 1))
    assert (metric.name, metric.value) == ("rmse", 2.0)
    assert metric.drop(1.6) == pytest.approx(25.0)
    metric = Metric("language_modeling")
    metric.update(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3, 8))
    assert metric.value == pytest.approx(math.log(8))


def test_a_metric_of_zero_has_no_percentage() -> None:
    metric = Metric("regression")
    metric.update(torch.ones(2, 1), torch.ones(2, 1), torch.ones(2, 1))
    assert metric.drop(0.0) == 0.0
    metric.update(torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2, 1))
    assert metric.drop(0.0) == math.inf


def test_an_output_that_is_nan_is_a_failure() -> None:
    inf, nan = math.inf, math.nan
    wanted = torch.tensor([1.0, -inf, nan])
    assert largest_difference(torch.tensor([1.5, -inf, nan]), wanted) == 0.5
    assert largest_difference(torch.tensor([1.5, 3.0, nan]), wanted) == inf
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0.0
    assert largest_difference(torch.tensor([True]), torch.tensor([False])) == 1.0
    for output in ([nan, -inf, nan], [1.0, -inf, 1.0]):
        with pytest.raises(
            ExportError, match="export: an output is NaN where that of the original is not; use another"
        ):
            largest_difference(torch.tensor(output), wanted)


def test_outputs_of_unknown_meaning_are_compared_themselves() -> None:
    metric = Metric("")
    metric.update(torch.tensor([3.0, 4.4]), None, torch.tensor([3.0, 4.0]))
    assert metric.name == "relative error"
    assert metric.drop(0.0) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("shape", "target", "kind"),
    [
        ((4, 3), torch.zeros(4, dtype=torch.int64), "classification"),
        ((4, 1), torch.zeros(4), "regression"),
        ((4, 3), torch.zeros(4), "outputs"),
        ((4, 3), None, "outputs"),
        ((4, 3), torch.tensor(1), "outputs"),
        ((4, 3), torch.zeros(5, dtype=torch.int64), "outputs"),
        ((4, 3), torch.zeros(4, 3, dtype=torch.int64), "outputs"),
        ((4,), torch.zeros(4, dtype=torch.int64), "outputs"),
        ((4, 3), torch.zeros(4, 3), "regression"),
    ],
)
def test_kinds_are_inferred(shape: tuple[int, ...], target: torch.Tensor | None, kind: str) -> None:
    assert infer_kind(torch.zeros(shape), target) == kind


def describe_files(folder: Path) -> dict[str, Any]:
    """What a card has about the only file of an export."""
    files = {"model.pt2": {"sha256": runner.sha256(folder / "model.pt2")}}
    return {"format": "torch", "program": "model.pt2", "files": files, "inputs": [], "outputs": []}


class Forgetful(GPT):
    """Passes keys and values on, and does not use them."""

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        found: list[Any] = []
        logits = super().forward(tokens, found)
        if cache is not None:
            cache[:] = [
                tuple(torch.cat(pair, dim=2) for pair in zip(*pairs, strict=True))
                for pairs in zip(cache or [[tensor[:, :, :0] for tensor in found[0]]], found, strict=True)
            ]
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, Forgetful])
def test_a_cache_must_give_the_same_logits(model: type[GPT], tmp_path: Path) -> None:
    task = LanguageModeling(model((16,), 32, num_layers=1, hidden_size=16), optimizer=partial(torch.optim.SGD, lr=0.1))
    for weight in task.model.parameters():
        weight.data *= 10  # else the logits depend on the last token only
    tokens = torch.randint(0, 32, (2, 16))
    program = TaskProgram(task, (tokens, tokens), {})
    TorchExport().write(program, tmp_path / "model.pt2", lambda: iter(()))
    assert len(program.cache) == 2
    facts = {"shape": ["batch", 4, "past", 4]}
    card = describe_files(tmp_path) | {"outputs": [{"name": "logits", "shape": [1, 16, 32]}], "cache": [facts, facts]}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with closing(Process(tmp_path, 1)) as process:
        if model is GPT:
            check_cache(program, process)
        else:
            with pytest.raises(ExportError, match="Forgetful returns other logits with its cache"):
                check_cache(program, process)


@pytest.mark.parametrize(("max_length", "length"), [(None, 2), (8, 8), (1000, 64)])
def test_a_cache_is_compared_on_the_first_tokens(max_length: int | None, length: int) -> None:
    tokens = torch.arange(200).view(2, 100)
    program: Any = SimpleNamespace(example=(tokens, tokens + 1), max_length=max_length, core=torch.nn.Identity())
    asked: list[torch.Tensor] = []

    def run(inputs: Inputs) -> tuple[list[torch.Tensor], float]:
        asked.append(inputs[0])
        return [torch.ones(1, length, 3)], 0.0

    for error in (0.0, 0.09, 0.2, math.nan):
        generate = lambda given, error=error: torch.full((1, given.size(1), 3), 1 + error)  # noqa: E731
        process: Any = SimpleNamespace(run=run, generate=generate)
        if error < 0.1:
            check_cache(program, process)
        else:
            with pytest.raises(
                ExportError, match=r"Identity returns other logits with its cache \(by (20\.0|nan)%\); set"
            ):
                check_cache(program, process)
        assert torch.equal(asked[-1], tokens[:1, :length])


class Here(Process):
    """The runner in this process, which takes no time to start."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.runner = runner.Runner(folder, None)
        self.modules = ["json.decoder", "numpy"]

    def _ask(self, what: str, inputs: Inputs) -> Any:
        return runner.answer(self.runner, what, [tensor.numpy() for tensor in inputs])

    def close(self) -> None: ...


INPUTS = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))


def classifier(seed: int) -> TaskProgram:
    torch.manual_seed(seed)
    task = Classification(Linear((6,), 3), optimizer=partial(torch.optim.SGD, lr=0.1))
    task.requires_grad_(False)
    return TaskProgram(task, (INPUTS, torch.zeros(60, dtype=torch.int64)), {})


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The original, whose targets are what it predicts, in batches of unequal size."""
    program = classifier(0)
    targets = program(INPUTS)[0].argmax(-1)
    parts = (slice(0, 25), slice(25, 50), slice(50, 60))
    return Reference(program, lambda: [(INPUTS[part], targets[part]) for part in parts])


def write_export(program: Program, folder: Path) -> Path:
    folder.mkdir()
    TorchExport().write(program, folder / "model.pt2", lambda: iter(()))
    (folder / "card.json").write_text(
        json.dumps(describe_files(folder) | {"outputs": [{"name": "probabilities", "shape": [4, 3]}]})
    )
    return folder


def test_a_ruined_export_is_found(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Process", Here)
    original = reference.result(100)
    assert (original.size, original.metric, original.value, original.drop) == (100, "accuracy", 1.0, 0.0)
    equal = verify(reference, original, write_export(reference.program, tmp_path / "equal"), {"boltcutter"})
    assert (equal.metric, equal.value, equal.drop) == ("accuracy", 1.0, 0.0)
    assert equal.max_difference < 1e-6
    assert equal.size == (tmp_path / "equal" / "model.pt2").stat().st_size
    check_drop({"fp32": original, "torch": equal}, 0.0)
    other = classifier(1)  # as if the weights were those of another run
    expected, wanted = other(INPUTS)[0], reference.program(INPUTS)[0]
    ruined = verify(reference, original, write_export(other, tmp_path / "ruined"), {"boltcutter"})
    accuracy = float((expected.argmax(-1) == wanted.argmax(-1)).float().mean())
    assert accuracy < 0.8
    assert ruined.value == pytest.approx(accuracy)
    assert ruined.drop == pytest.approx(100 - 100 * accuracy)
    assert ruined.max_difference == pytest.approx(float((expected - wanted).abs().max()), abs=1e-6)
    for found in (original, equal, ruined):
        assert found.latency
        assert [*found.latency] == [1, 32]
        assert min(found.latency.values()) > 0
        assert found.throughput
        assert found.throughput > 60  # it took less than a second
    with pytest.raises(ExportError, match=r"new process has imported json; remove it from site-packages"):
        verify(reference, original, tmp_path / "equal", {"jso", "json"})
    with pytest.raises(ExportError, match=r"^export=torch: accuracy .* instead of 1\.0000 is worse by .* points"):
        check_drop({"fp32": original, "torch": ruined}, 0.5)


def test_the_cache_of_an_export_is_compared(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(module, "Process", Here)
    monkeypatch.setattr(module, "check_cache", lambda *given: checked.append(given))
    export = write_export(reference.program, tmp_path / "export")
    verify(reference, reference.result(1), export, set())
    assert checked == []
    monkeypatch.setattr(reference.program, "cache", [("keys", "values")])
    verify(reference, reference.result(1), export, set())
    assert [(program, type(process)) for program, process in checked] == [(reference.program, Here)]


def test_outputs_that_are_nan_ruin_an_export(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Process", Here)
    broken = classifier(0)
    next(broken.parameters()).data[0] = math.nan
    with pytest.raises(ExportError, match="an output is NaN where that of the original is not"):
        verify(reference, reference.result(1), write_export(broken, tmp_path / "nan"), set())


def test_weights_that_differ_in_a_bit_are_found(reference: Reference, tmp_path: Path) -> None:
    original, path = reference.result(1), tmp_path / "model.safetensors"
    SafeTensors().write(reference.program, path, lambda: iter(()))
    found = verify(reference, original, tmp_path, {"boltcutter", "torch"})
    assert found == Result(path.stat().st_size, "accuracy", 1.0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ExportError, match=r"^export=safetensors: \w+\.\w+ differs from the checkpoint; export it again$"
    ):
        verify(reference, original, tmp_path, set())


def test_outputs_that_are_large_are_compared_in_chunks(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(reference)
    assert [len(inputs[0]) for inputs, *_ in whole] == [25, 25, 10]
    monkeypatch.setattr(module, "MAX_ELEMENTS", 30)  # ten rows of three probabilities
    chunks = list(reference)
    assert [len(inputs[0]) for inputs, *_ in chunks] == [10, 10, 5, 10, 10, 5, 10]
    assert torch.equal(torch.cat([inputs[0] for inputs, *_ in chunks]), INPUTS)
    assert torch.equal(
        torch.cat([targets for _, targets, *_ in chunks if targets is not None]),
        torch.cat([targets for _, targets, *_ in whole if targets is not None]),
    )
    monkeypatch.setattr(module, "MAX_ELEMENTS", 2)  # fewer than an output has
    assert len(list(reference)) == 60


def test_a_folder_without_export_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"fails in a new process: ValueError: .* holds no export"):
        Process(tmp_path, 1)


@pytest.mark.slow
def test_a_process_that_ends_is_reported(tmp_path: Path) -> None:
    example = torch.zeros(2, 1000)
    torch.export.save(torch.export.export(torch.nn.ReLU(), (example,)), tmp_path / "model.pt2")
    (tmp_path / "card.json").write_text(json.dumps(describe_files(tmp_path)))
    with closing(Process(tmp_path, 1)) as process:
        process.process.kill()
        process.process.wait()
        with pytest.raises(ExportError, match="fails in a new process: exit status -9"):
            process.run((torch.zeros(2, 100_000),))
