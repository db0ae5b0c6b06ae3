"""A trained model with its pre- and post-processing as one module that ``torch.export`` can capture."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from boltcutter.config.errors import one_line
from boltcutter.config.locate import origin
from boltcutter.export.settings import ExportError
from boltcutter.export.tabular import TableEncoder, describes_table
from boltcutter.protocols import GeneratesTokens, NativeTask, find_model
from boltcutter.structure import children, count_samples, inputs_of, targets_of, tensor_names, tensors, with_tensors

MAX_BATCH = 1 << 16
MAX_LENGTH = 1 << 20  # of a dimension that varies between batches
PAST, PRESENT = "past_key_values.", "present."  # as in exports of Hugging Face Optimum
OUTPUTS = {"classification": "probabilities", "regression": "values", "language_modeling": "logits"}
Inputs = tuple[Tensor, ...]


class Program(nn.Module):
    """A model with its pre- and post-processing: from raw inputs to what a user wants to know.

    Attributes:
        kind: What targets are, such as ``classification``; empty if unknown.
        dtype: Floating-point dtype of ``core``.
        example: Inputs of at least two samples.
        axes: Names of the dynamic dimensions of each input: ``batch``, and those whose size varies between batches.
        outputs: Names of the outputs.
        takes: Whether the inputs are tensors of a whole ``batch`` of the data module, of its ``inputs``, or of those
            that a ``task`` of the library takes.
        leaves: All tensors of that structure.
        used: Positions of the inputs among them.
        max_length: Maximum size of the second dimension if it is dynamic, as that of sequences; None: it is fixed.
        cache: Of a language model: the empty keys and values (1, heads, 0, D) of each layer, by name. Inputs and
            outputs of the captured graph have them after the others, with the prefixes ``PAST`` and ``PRESENT``.
    """

    def __init__(
        self, task: L.LightningModule, example: Inputs, inputs: list[str], axes: list[dict[int, str]] | None = None
    ) -> None:
        super().__init__()
        self.task = task.eval()
        self.inputs, self.outputs = inputs, list[str]()
        self.axes = [{0: "batch"} for _ in example] if axes is None else axes
        self.example = example
        self.example = self.select([*range(self.count(example)), 0][: max(2, self.count(example))], example)
        self.kind, self.dtype = "", torch.float32
        self.takes, self.leaves, self.used = "inputs", list(example), list(range(len(example)))
        self.max_length: int | None = None
        self.cache: dict[str, Tensor] = {}
        self._captured: ExportedProgram | None = None

    @property
    def core(self) -> nn.Module:
        """The part whose weights may have another precision: the network of the library's tasks, or else the task."""
        model = find_model(self.task)
        return model if isinstance(self.task, NativeTask) and isinstance(model, nn.Module) else self.task

    @abstractmethod
    def run(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name; with a cache among the inputs, also the extended one."""

    @abstractmethod
    def split(self, batch: Any) -> tuple[Inputs, Tensor | None]:
        """Split a batch of the data module into raw inputs and targets, if it has any."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, in float32."""
        if self.dtype != torch.float32:
            inputs = tuple(tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor for tensor in inputs)
        # Conversions that do nothing are nodes of the graph, too, for each tensor of a cache.
        return tuple(
            tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float32 else tensor
            for tensor in self.run(*inputs).values()
        )

    def count(self, inputs: Inputs) -> int:
        """Number of samples of a batch."""
        sizes = (
            tensor.size(axis) for tensor, axis in zip(inputs, map(_batch_axis, self.axes), strict=True) if axis >= 0
        )
        return next(sizes, 1)

    def select(self, samples: list[int], inputs: Inputs) -> Inputs:
        """Some samples of a batch; tensors without a dimension of samples stay whole."""
        rows = torch.tensor(samples, dtype=torch.int64)
        axes = map(_batch_axis, self.axes)
        return tuple(t if axis < 0 else t.index_select(axis, rows) for t, axis in zip(inputs, axes, strict=True))

    @property
    def dimensions(self) -> list[dict[int, str]]:
        """Names of the dynamic dimensions of each input."""
        return [{0: "batch", 1: "length"} for _ in self.example] if self.max_length else self.axes

    def with_cache(self, inputs: Inputs) -> Inputs:
        """Return all inputs of the captured graph: the inputs and an empty cache."""
        return (*inputs, *(tensor.expand(len(inputs[0]), -1, -1, -1) for tensor in self.cache.values()))

    @property
    def graph_inputs(self) -> list[str]:
        """Names of all inputs of the captured graph."""
        return self.inputs + [PAST + name for name in self.cache]

    @property
    def graph_outputs(self) -> list[str]:
        """Names of all outputs of the captured graph."""
        return self.outputs + [PRESENT + name for name in self.cache]

    def capture(self) -> ExportedProgram:
        """Capture the program as a graph with a dynamic batch size.

        Raises:
            ExportError: The code of the model cannot be captured.
        """
        while self._captured is None:
            try:
                self._captured = self._capture()
            except Exception as error:  # the code of a model may raise anything
                if self.max_length is None:
                    raise self._explain(error) from error
                if not self.cache:
                    self.max_length = None  # it may need a fixed length
                self.cache = {}
        return self._captured

    def clone(self) -> Program:
        """Return a copy that is not captured."""
        return copy.deepcopy(self, {id(self._captured): None})

    def convert(self, dtype: torch.dtype) -> Program:
        """Return a copy in another precision."""
        clone = self.clone()
        clone.core.to(dtype)
        clone.dtype = dtype
        return clone

    def _capture(self) -> ExportedProgram:
        batch = Dim("batch", min=1, max=MAX_BATCH)
        lengths = {name for axes in self.axes for name in axes.values()} - {"batch"}
        known = {"batch": batch, **{name: Dim(name, min=2, max=MAX_LENGTH) for name in lengths}}
        try:
            return self._export([{axis: known[name] for axis, name in axes.items()} for axes in self.axes], batch)
        except Exception:
            if not lengths or self.max_length:
                raise
        # Relations between lengths, such as that one is half of another, and their minima are then found.
        known |= dict.fromkeys(lengths, Dim.DYNAMIC)
        return self._export([{axis: known[name] for axis, name in axes.items()} for axes in self.axes], batch)

    def _export(self, shapes: list[dict[int, Any]], batch: Any) -> ExportedProgram:
        example = self.example
        if self.max_length:
            past = self.max_length // 2 if self.cache else 0
            length = Dim("length", min=1 if self.cache else 2, max=self.max_length)
            shapes = [{0: batch, 1: length} for _ in example]
            shapes += [{0: batch, 2: Dim("past", min=0, max=self.max_length)} for _ in self.cache]
            example = tuple(tensor[:, : max(2, self.max_length - past - 1)].contiguous() for tensor in example)
            example += tuple(F.pad(tensor, (0, 0, 0, past)) for tensor in self.with_cache(example)[len(example) :])
        plain = self.clone()  # with weights in the format that files store
        for weight in [weight for weight in plain.parameters() if weight.ndim == 4 and not weight.is_contiguous()]:
            weight.data = weight.data.contiguous()
        with torch.no_grad():
            return torch.export.export(plain, example, dynamic_shapes=(tuple(shapes),), strict=False)

    def _explain(self, error: Exception) -> ExportError:
        name, top = type(self.core).__name__, type(self.core).__module__.partition(".")[0]
        text = one_line(str(error).strip().split("\n\n")[0])[:300]
        lengths = sorted({name for axes in self.dimensions for name in axes.values()} - {"batch"})
        sizes = f"any batch size and {', '.join(lengths)}" if lengths else "any batch size"
        return ExportError(
            f"export: {name} cannot be captured by torch.export: {text} ({origin(error, top)}); it must consist of "
            f"tensor operations that work for {sizes}"
        )


class TaskProgram(Program):
    """A task of the library: probabilities, values in the unit of the targets, or logits of each next token."""

    def __init__(
        self, task: L.LightningModule, batch: Any, statistics: Mapping[str, Any], others: Iterable[Any] = ()
    ) -> None:
        encoder = TableEncoder(statistics) if describes_table(statistics) else None
        kind = str(getattr(task, "kind", ""))
        self.structure = inputs = inputs_of(batch)
        names, axes = ["rows" if encoder else "tokens"], None
        if not encoder and kind != "language_modeling":
            names, axes = tensor_names(inputs), find_axes([batch, *others])
        given = tensors(inputs)
        super().__init__(task, (encoder.invert(inputs),) if encoder else tuple(given), names, axes)
        self.takes = "task"
        self.kind, self.encoder, self.outputs = kind, encoder, [OUTPUTS.get(kind, "predictions")]
        if kind == "language_modeling":
            model = find_model(task)
            self.max_length = getattr(model, "context_length", None)
            self.example = (self.example[0].long(),)
            if self.max_length and isinstance(task, GeneratesTokens):
                self.cache = find_cache(model, self.example[0][:1])

    def run(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return predictions, or logits for language."""
        task: Any = self.task
        if len(inputs) > len(self.inputs):
            cache = list(zip(inputs[1::2], inputs[2::2], strict=True))
            logits = task.model(inputs[0], cache)
            return dict(zip(self.graph_outputs, (logits, *tensors(cache)), strict=True))
        features = with_tensors(self.structure, inputs)
        if self.encoder is not None:
            features = self.encoder(inputs[0]).to(self.dtype)
        outputs = task(features)
        return {self.outputs[0]: outputs if self.kind == "language_modeling" else task.predictions(outputs)}

    def split(self, batch: Any) -> tuple[Inputs, Tensor | None]:
        """Split a batch into raw inputs and targets."""
        inputs, targets = inputs_of(batch), targets_of(batch)
        targets = targets if isinstance(targets, Tensor) else None
        if self.encoder is not None:
            return (self.encoder.invert(inputs),), targets
        if self.kind == "language_modeling":
            return (inputs.long(),), targets
        found = tuple(tensors(inputs))
        check_count(found, len(self.inputs))
        return found, targets


def find_cache(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return an empty cache of a language model, by name; nothing if it caches other than keys and values."""
    cache: list[Any] = []
    if getattr(model, "supports_cache", False):
        with torch.no_grad():
            model(tokens, cache)
    leaves = tensors(cache)
    names = [f"{layer}.{name}" for layer in range(len(cache)) for name in ("key", "value")]
    if len(leaves) != len(names) or not all(
        isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[::2] == tokens.shape for leaf in leaves
    ):
        return {}
    return {name: leaf[:1, :, :0].float() for name, leaf in zip(names, leaves, strict=True)}


class ModuleProgram(Program):
    """Any LightningModule: its ``predict_step`` for a batch of the data module, or else its ``forward``.

    ``forward`` takes ``example_input_array``, or else the inputs of a batch. Tensors that the outputs do not depend on,
    such as targets, are not inputs of the export.

    Raises:
        ExportError: There is no tensor in the batch, or the code of the module cannot be captured.
    """

    def __init__(self, task: L.LightningModule, batch: Any, others: Iterable[Any] = ()) -> None:
        self.is_step = is_overridden("predict_step", task)
        self.is_example = not self.is_step and task.example_input_array is not None
        self.structure = self._structure(batch, task.example_input_array)
        leaves = tensors(self.structure)
        used = [index for index, leaf in enumerate(leaves) if leaf.ndim]
        if not used:
            raise ExportError(
                f"export: a batch of {type(task).__name__} has no tensor; set its example_input_array to inputs of "
                "forward"
            )
        axes = None
        if not self.is_example:
            found = find_axes([batch, *others], lambda each: each if self.is_step else model_inputs(each, len(leaves)))
            axes = [found[index] for index in used]
        super().__init__(task, tuple(leaves[index] for index in used), [], axes)
        self.takes, self.leaves, self.used = "batch" if self.is_step else "inputs", leaves, used
        placeholders = {node.name: node for node in self.capture().graph.nodes if node.op == "placeholder"}
        names = self.capture().graph_signature.user_inputs
        keep = [number for number, name in enumerate(names) if placeholders[str(name)].users]
        if len(keep) < len(names):
            self._captured = None
        self.used, self.example = [self.used[n] for n in keep], tuple(self.example[n] for n in keep)
        self.axes = [self.axes[n] for n in keep]
        self.inputs = ["input"] if len(keep) == 1 else [f"input_{number}" for number in range(len(keep))]
        with torch.no_grad():
            self.outputs = list(self.run(*self.example))

    def run(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return all tensors of the output of ``predict_step`` or ``forward``."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.used, inputs, strict=True):
            leaves[index] = tensor
        structure = with_tensors(self.structure, leaves)
        if self.is_step:
            outputs = self.task.predict_step(structure, 0)
        elif self.is_example and isinstance(structure, tuple):
            outputs = self.task(*structure)
        else:
            outputs = (
                self.task(**structure) if self.is_example and isinstance(structure, dict) else self.task(structure)
            )
        if isinstance(outputs, Mapping):
            return {str(name): value for name, value in outputs.items() if isinstance(value, Tensor)}
        found = tensors(outputs)
        return {"output" if len(found) == 1 else f"output_{number}": leaf for number, leaf in enumerate(found)}

    def split(self, batch: Any) -> tuple[Inputs, Tensor | None]:
        """Split a batch into inputs and targets.

        Raises:
            ExportError: The batch has another structure than ``example_input_array``.
        """
        structure = batch if self.is_step else model_inputs(batch, len(self.leaves))
        leaves = tensors(structure)
        if self.is_example and len(leaves) != len(self.leaves):
            raise ExportError(
                f"export: a batch has {len(leaves)} inputs, and example_input_array of {type(self.task).__name__} has "
                f"{len(self.leaves)}; give both the same structure"
            )
        if max(self.used) >= len(leaves):
            check_count(leaves, len(self.leaves))
        targets = targets_of(batch)
        return tuple(leaves[index] for index in self.used), targets if isinstance(targets, Tensor) else None

    def _structure(self, batch: Any, example: Any) -> Any:
        return example if self.is_example else batch if self.is_step else model_inputs(batch)


def select_inputs(batch: Any, card: Mapping[str, Any]) -> Inputs:
    """Return the inputs of an export in a batch of the data module."""
    takes = card["takes"]
    whole = batch if takes == "batch" else inputs_of(batch) if takes == "task" else model_inputs(batch, card["leaves"])
    leaves = tensors(whole)
    if takes == "task" or any(facts["leaf"] >= len(leaves) for facts in card["inputs"]):
        check_count(leaves, card["leaves"])
    return tuple(leaves[facts["leaf"]] for facts in card["inputs"])


def check_count(found: Sequence[Tensor], count: int) -> None:
    """Check the number of tensors in the inputs of a batch.

    Raises:
        ExportError: It is another than that of the batch with which the model was captured.
    """
    if len(found) != count:
        raise ExportError(
            f"export: a batch has {len(found)} tensors as inputs, and another one {count}, while a file has a fixed "
            "number of inputs; pad and stack the samples in collate_fn, with a mask or their lengths"
        )


def check_fixed(inputs: Any) -> None:
    """Check that all inputs are tensors whose rows are samples, of the same lengths in a batch.

    Raises:
        ExportError: There is a ``PackedSequence`` or a nested tensor.
    """
    kind = "PackedSequence" if isinstance(inputs, PackedSequence) else ""
    kind = kind or ("nested tensor" if isinstance(inputs, Tensor) and inputs.is_nested else "")
    if kind:
        raise ExportError(
            f"export: the inputs of a batch are a {kind}, in which the lengths of the samples are no dimension; return "
            "padded tensors from collate_fn, with a mask or their lengths"
        )
    for part in children(inputs) or ():
        check_fixed(part)


def find_axes(batches: Sequence[Any], inputs: Callable[[Any], Any] = inputs_of) -> list[dict[int, str]]:
    """Find the dynamic dimensions of the inputs of batches, by their sizes in several batches.

    A dimension is ``batch`` if it has the size of the batch in all of them, and is otherwise dynamic if its size
    varies: those whose sizes are the same in each batch have one name, ``length``, ``length_1`` and so on.

    Returns:
        For each tensor, the names of its dynamic dimensions.

    Raises:
        ExportError: Batches have different numbers of tensors or dimensions.
    """
    for part in map(inputs, batches):
        check_fixed(part)
    found = [tensors(inputs(batch)) for batch in batches]
    common = min(map(len, found))  # targets, which may be lists, follow the inputs
    given = [tensors(inputs_of(batch)) for batch in batches]
    for leaves in given[1:]:
        check_count(leaves, len(given[0]))
    counts = tuple(count_samples(targets_of(batch)) or count_samples(batch) or 1 for batch in batches)
    names, axes = {counts: "batch"}, list[dict[int, str]]()
    for of_leaf in zip(*(leaves[:common] for leaves in found), strict=True):
        if len({tensor.ndim for tensor in of_leaf}) > 1:
            raise ExportError(
                "export: a tensor of the batches has different numbers of dimensions; stack samples alike"
            )
        axes.append({})
        for axis, sizes in enumerate(zip(*(tensor.shape for tensor in of_leaf), strict=True)):
            is_batch = sizes == counts and "batch" not in axes[-1].values() and (axis == 0 or len(set(sizes)) > 1)
            if is_batch or (sizes != counts and len(set(sizes)) > 1):
                axes[-1][axis] = names.setdefault(sizes, "length" if len(names) == 1 else f"length_{len(names) - 1}")
    return axes + [{} for _ in found[0][common:]]


def _batch_axis(axes: Mapping[int, str]) -> int:
    """The dimension of the samples; -1 if there is none."""
    return next((axis for axis, name in axes.items() if name == "batch"), -1)


def model_inputs(batch: Any, count: int = 1) -> Any:
    """Return the inputs of a batch: its first element if it is a pair of inputs and targets, else all of it."""
    has_targets = isinstance(batch, list | tuple) and len(batch) > 1 and len(tensors(batch)) > count
    return batch[0] if has_targets or (isinstance(batch, list | tuple) and len(batch) == 1) else batch
