import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.export.formats import TorchExport
from boltcutter.export.program import TaskProgram
from boltcutter.export.settings import ExportError
from boltcutter.export.verify import Metric, Process, compare_generated, infer_kind, largest_difference
from boltcutter.model.gpt import GPT
from boltcutter.task.language import LanguageModeling


def test_accuracy_drops_by_points() -> None:
    metric = Metric("classification")
    outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    for part in (slice(0, 3), slice(3, 4)):
        metric.update(outputs[part], torch.tensor([0, 1, 1, 1])[part], outputs[part])
    assert (metric.name, metric.value) == ("accuracy", 0.75)
    assert metric.drop(0.8) == pytest.approx(5.0)


def test_other_metrics_drop_by_percent() -> None:
    metric = Metric("regression")
    metric.update(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]]), torch.zeros(2, 1))
    assert (metric.name, metric.value) == ("rmse", 1.0)
    assert metric.drop(0.8) == pytest.approx(25.0)
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
    ],
)
def test_kinds_are_inferred(shape: tuple[int, ...], target: torch.Tensor | None, kind: str) -> None:
    assert infer_kind(torch.zeros(shape), target) == kind


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
    card = {"program": "model.pt2", "files": {}, "outputs": ["logits"], "cache": [facts, facts]}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with Process(tmp_path, 1) as process:
        if model is GPT:
            assert compare_generated(program, process) == 1
        else:
            with pytest.raises(ExportError, match="Forgetful returns other logits with its cache"):
                compare_generated(program, process)


def test_a_process_that_ends_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"fails in a new process: ValueError: .* holds no export"):
        Process(tmp_path, 1)
    example = torch.zeros(2, 1000)
    torch.export.save(torch.export.export(torch.nn.ReLU(), (example,)), tmp_path / "model.pt2")
    (tmp_path / "card.json").write_text(json.dumps({"program": "model.pt2", "files": {}}))
    with Process(tmp_path, 1) as process:
        process.process.kill()
        process.process.wait()
        with pytest.raises(ExportError, match="fails in a new process: exit status -9"):
            process.run((torch.zeros(2, 100_000),))
