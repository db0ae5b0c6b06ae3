"""Keras 3 models on the torch backend, as modules that train like any other."""

from __future__ import annotations

import copy
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

if "keras" not in sys.modules:
    # Keras chooses its backend when it is first imported. Weights start on the CPU, as those of torch modules do.
    os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cpu")
import keras as keras  # for the modules beside this one
from keras.src.random.seed_generator import global_seed_generator

COUNTER = re.compile(r"_\d+$")
SEED = "seed_generator"
SUFFIXES = (".keras", ".weights.h5")


class Unsupported(RuntimeError):
    """What a Keras model cannot do, found when it is first called."""

    hide_traceback = True  # needs no traceback


class KerasModel(nn.Module):
    """A Keras model as a torch module.

    A bare ``keras.Model`` ignores ``train()`` and ``eval()``, lists moving statistics as parameters, and names its
    weights with counters of the process. Here ``training`` follows the mode of the module, the module itself holds the
    state, and names are the same in every process: ``conv2d/kernel``, ``conv2d_1/kernel`` in the order of the model.
    Layers that draw random numbers are seeded from torch's generator at each training step.

    Args:
        model: On the torch backend. Copies of this module share it: it holds the structure, and they their own state.
        input_shape: Shape of one sample of the data; needed where the model has no weights before it is first called.
        channels_first: The data has its channels first, (N, C, …), but the model expects them last. Outputs with more
            than two dimensions are returned with their channels first.

    Raises:
        ValueError: Keras runs on another backend, the model has no weights, or it has a part that would be ignored.
    """

    def __init__(
        self, model: keras.Model, *, input_shape: Sequence[int] | None = None, channels_first: bool = False
    ) -> None:
        super().__init__()
        check_backend()
        self.channels_first = channels_first
        if input_shape is not None and not (model.built and model.variables):
            sample = torch.zeros(1, *input_shape)
            with torch.no_grad():
                model(sample.movedim(1, -1) if channels_first else sample, training=False)
        check_model(model)
        # Not a submodule: torch would list its variables once more, under other names.
        self.__dict__["keras_model"] = model
        self._variables = dict(zip(variable_names(model), model.variables, strict=True))
        self._seeds = [name for name in self._variables if SEED in name.split("/")[-2:][0]]
        self._global_seed = global_seed_generator().state
        learned = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        for name, variable in self._variables.items():
            if id(variable) in learned:
                self.register_parameter(name, nn.Parameter(variable.value.detach(), variable.trainable))
            else:
                self.register_buffer(name, variable.value.detach())
        self._updated = [name for name in self._buffers if name not in self._seeds]
        self._called = False

    def forward(self, *inputs: Any) -> Any:
        """The outputs of the Keras model, which is told whether it is training.

        Raises:
            Unsupported: A layer adds a loss of its own, or the weights have another dtype than the model computes in.
        """
        if not self._called:
            self._check_dtype()
        scope = self._scope(collect_losses=not self._called)
        if self.training:
            self._seed(scope)
        if self.channels_first:
            inputs = tuple(keras.tree.map_structure(lambda x: x.movedim(1, -1), list(inputs)))
        device = next(iter(scope.state_mapping.values())).device
        with keras.device(str(device)), scope:
            outputs = self.__dict__["keras_model"](*inputs, training=self.training)
        if self.training:
            self._keep(scope, self._updated)
        if scope.losses:
            raise Unsupported(
                f"model: {type(self.__dict__['keras_model']).__name__} calls add_loss, which the task would not add to "
                "its loss; compute that loss in a task of your own"
            )
        self._called = True
        if not self.channels_first:
            return outputs
        return keras.tree.map_structure(lambda y: y.movedim(-1, 1) if y.ndim > 2 else y, outputs)

    def check_inputs(self, shape: Sequence[int]) -> None:
        """Compare the shape of one sample of the data with what the Keras model expects.

        Raises:
            ValueError: They differ.
        """
        expected = getattr(self.__dict__["keras_model"], "input_shape", None)
        if not isinstance(expected, tuple) or not all(size is None or isinstance(size, int) for size in expected):
            return  # any shape, or several inputs
        found = (*shape[1:], shape[0]) if self.channels_first and shape else tuple(shape)
        if len(found) == len(expected) - 1 and all(e in (None, f) for e, f in zip(expected[1:], found, strict=True)):
            return
        remedy = f"build it with keras.Input({found})"
        if not self.channels_first and expected[1:] == (*shape[1:], shape[0]):
            remedy = "its channels are last: take boltcutter.model.keras.KerasModel with model.channels_first=true"
        raise ValueError(f"model: the Keras model expects samples of {expected[1:]}, data.shape is {found}; {remedy}")

    def save(self, path: str | Path) -> None:
        """Write the weights, with the model in a ``.keras`` file, or alone in a ``.weights.h5`` file.

        Raises:
            ValueError: The path ends in neither.
        """
        path = Path(path)
        suffix = _suffix(path)
        draft = path.with_name(f".{path.name.removesuffix(suffix)}.{os.getpid()}{suffix}")
        model = self.__dict__["keras_model"]
        try:
            with keras.device("cpu"), self._scope(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "__array__", DeprecationWarning)  # Keras's own, of NumPy 2
                (model.save if suffix == ".keras" else model.save_weights)(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, path: str | Path) -> list[str]:
        """Take over the weights of a ``.keras`` or ``.weights.h5`` file, where layers and shapes fit.

        Of a ``.keras`` file the weights are read alone: nothing that its configuration names is built or called.

        Returns:
            Names of what the file does not have.

        Raises:
            ValueError: The path ends in neither, or nothing in the file fits.
            OSError: The file cannot be read.
        """
        _suffix(Path(path))
        scope = self._scope()
        before = dict(scope.state_mapping)
        with keras.device("cpu"), scope, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of each layer that is skipped
            self.__dict__["keras_model"].load_weights(path, skip_mismatch=True)
        missing = [n for n, v in self._variables.items() if scope.get_current_value(v) is before[id(v)]]
        if len(missing) == len(self._variables):
            raise ValueError("no layer in it fits the model")
        self._keep(scope, list(self._variables))
        return [name for name in missing if name not in self._seeds]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: torch's compiler breaks Keras's calls into many graphs, and compiles them again and again.

        Raises:
            Unsupported: Always.
        """
        raise Unsupported("task.compile=true: torch cannot compile a Keras model; set task.compile=false")

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """A copy with a state of its own and the same structure."""
        shared = [self.__dict__["keras_model"], self._global_seed, *self._variables.values()]
        memo |= {id(part): part for part in shared}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _check_dtype(self) -> None:
        for name, variable in self._variables.items():
            found = str(getattr(self, name).dtype).removeprefix("torch.")
            if found != variable.dtype:
                raise Unsupported(
                    f"trainer.precision: the weights are {found}, but the Keras model computes in {variable.dtype}, in "
                    "which it was built; try bf16-mixed or 32-true"
                )

    def _scope(self, *, collect_losses: bool = False) -> Any:
        """A scope in which the variables of the Keras model have the values of this module."""
        scope = keras.StatelessScope(collect_losses=collect_losses, initialize_variables=False)
        scope.state_mapping = {id(variable): getattr(self, name) for name, variable in self._variables.items()}
        return scope

    def _seed(self, scope: Any) -> None:
        variables = [self._global_seed, *(self._variables[name] for name in self._seeds)]
        drawn = torch.randint(2**31 - 1, (len(variables), 2), dtype=torch.int32)
        scope.state_mapping.update(zip(map(id, variables), drawn, strict=True))

    def _keep(self, scope: Any, names: list[str]) -> None:
        """Take over what was assigned to variables in the scope."""
        with torch.no_grad():
            for name in names:
                value, mine = scope.get_current_value(self._variables[name]), getattr(self, name)
                if value is not mine:
                    mine.copy_(value)


def check_backend() -> None:
    """Raise ValueError unless Keras runs on torch."""
    backend = keras.config.backend()
    if backend != "torch":
        raise ValueError(
            f"KERAS_BACKEND={backend}: Keras was imported with this backend, and models are trained on torch; import "
            "it later, or set KERAS_BACKEND=torch"
        )


def check_model(model: keras.Model) -> None:
    """Raise ValueError where the model has no weights, or a part that training by torch would ignore."""
    if not model.built or not model.variables:
        raise ValueError(
            f"{type(model).__name__} has no weights before it is first called; begin it with keras.Input(…), or "
            "take boltcutter.model.keras.KerasModel with model.input_shape=${data.shape}"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            raise ValueError(
                f"{layer.name} wraps a torch module, whose buffers Keras does not save; write the whole model in torch"
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(f"{layer.name} has an activity_regularizer, which the task would ignore; remove it")
    for variable in model.variables:
        if variable.regularizer is not None:
            raise ValueError(
                f"{variable.path} has a regularizer, which the task would ignore; remove it and set task.l2"
            )
        if variable.constraint is not None:
            raise ValueError(f"{variable.path} has a constraint, which the optimizer would ignore; remove it")


def variable_names(model: keras.Model) -> list[str]:
    """Paths of the model's variables, with automatic names counted anew from the first layer of this model.

    Keras numbers layers over the whole process: the second model that is built in it begins with ``dense_3``.
    """
    chosen = {  # by the model's author; a layer that was taken from another model has that model's name in its path
        layer.name
        for layer in model._flatten_layers()
        if COUNTER.sub("", layer.name).replace("_", "") != type(layer).__name__.lower()
    }
    given: dict[tuple[str, ...], str] = {}  # by the path in this process
    names: list[str] = []
    for variable in model.variables:
        *raw, last = variable.path.split("/")
        name = ""
        for depth, part in enumerate(raw, 1):
            place = tuple(raw[:depth])
            if place not in given:
                plain = part if part in chosen else COUNTER.sub("", part)
                given[place] = _free(f"{name}{plain}", set(given.values()))
            name = f"{given[place]}/"
        names.append(_free(f"{name}{last}", set(names)))
    return names


def _free(name: str, taken: set[str]) -> str:
    numbered = (name if count == 0 else f"{name}_{count}" for count in range(len(taken) + 1))
    return next(candidate for candidate in numbered if candidate not in taken)


def _suffix(path: Path) -> str:
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    raise ValueError(f"{path} is not a file of Keras; its name must end in {' or '.join(SUFFIXES)}")
