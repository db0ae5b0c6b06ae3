"""Keras 3 models on the torch backend as ``torch.nn`` modules."""

from __future__ import annotations

import copy
import io
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from boltcutter.files import expansion_limit

if "keras" not in sys.modules:
    # Keras selects its backend on first import. Weights are created on the CPU, as those of torch modules.
    os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cpu")
import h5py
import keras as keras  # re-exported, so that other modules import it after the backend is set
from keras.src.random.seed_generator import global_seed_generator

COUNTER_SUFFIX = re.compile(r"_[0-9]+$")
SEED_GENERATOR = "seed_generator"
SUFFIXES = (".keras", ".weights.h5")
WEIGHTS = "model.weights.h5"  # in a .keras file


class UnsupportedModelError(RuntimeError):
    """A Keras model uses something that training in torch does not support."""

    hide_traceback = True


class KerasModel(nn.Module):
    """A Keras model as a torch module.

    A ``keras.Model`` ignores ``train()`` and ``eval()``, has moving statistics among its parameters, and weight names
    that depend on the models built before it. This wrapper passes the module's mode as ``training``, registers weights
    as parameters and moving statistics as buffers, and gives them reproducible names: ``conv2d/kernel``,
    ``conv2d_1/kernel`` in the order of the model. Random layers are seeded from torch's generator in each step.

    Args:
        model: A model on the torch backend. Copies of this module share its structure, but have their own state.
        input_shape: Shape of one sample; needed if the model has no weights before its first call.
        channels_first: Whether the data has its channels first, (N, C, …), while the model expects them last. Outputs
            with more than two dimensions are converted back to channels first.

    Raises:
        ValueError: Keras has another backend, the model has no weights, or it has a part that training would ignore.
    """

    keras_model: keras.Model

    @staticmethod
    def adapts(kind: type) -> bool:
        """Whether a class is a Keras model, which a configuration may give in place of this module."""
        return issubclass(kind, keras.Model)

    def __init__(
        self, model: keras.Model, *, input_shape: Sequence[int] | None = None, channels_first: bool = False
    ) -> None:
        super().__init__()
        if (backend := keras.config.backend()) != "torch":
            raise ValueError(
                f"KERAS_BACKEND={backend} is not supported, and Keras is already imported; set KERAS_BACKEND=torch"
            )
        self.channels_first = channels_first
        if input_shape is not None and not (model.built and model.variables):
            sample = torch.zeros(1, *input_shape)
            with torch.no_grad():
                model(sample.movedim(1, -1) if channels_first else sample, training=False)
        check_model(model)
        # Not registered as a submodule, which would register its variables again under other names.
        vars(self)["keras_model"] = model
        self._variables = dict(zip(variable_names(model), model.variables, strict=True))
        self._seeds = [name for name in self._variables if SEED_GENERATOR in name.split("/")[-2:][0]]
        self._global_seed = global_seed_generator().state
        trainable = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        for name, variable in self._variables.items():
            if id(variable) in trainable:
                self.register_parameter(name, nn.Parameter(variable.value.detach(), variable.trainable))
            else:
                self.register_buffer(name, variable.value.detach())
        self._updated = [name for name in self._buffers if name not in self._seeds]
        self._called = False

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs of the Keras model.

        Raises:
            UnsupportedModelError: A layer adds a loss, or the weights have another dtype than the Keras model.
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
            outputs = self.keras_model(*inputs, training=self.training)
        if self.training:
            self._update(scope, self._updated)
        if scope.losses:
            raise UnsupportedModelError(
                f"model: {type(self.keras_model).__name__} calls add_loss, which the task ignores; "
                "compute that loss in a subclass of the task"
            )
        self._called = True
        if not self.channels_first:
            return outputs
        return keras.tree.map_structure(lambda y: y.movedim(-1, 1) if y.ndim > 2 else y, outputs)

    def save(self, path: str | Path) -> None:
        """Save the model with its weights as a ``.keras`` file, or only the weights as a ``.weights.h5`` file.

        Raises:
            ValueError: The path has another suffix.
        """
        path = Path(path)
        suffix = _suffix(path)
        temporary = path.with_name(f".{path.name.removesuffix(suffix)}.{os.getpid()}{suffix}")
        model = self.keras_model
        try:
            with keras.device("cpu"), self._scope(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "__array__", DeprecationWarning)  # raised in Keras with NumPy 2
                (model.save if suffix == ".keras" else model.save_weights)(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: str | Path) -> list[str]:
        """Load the weights of a ``.keras`` or ``.weights.h5`` file whose layers and shapes match.

        The configuration in a ``.keras`` file is ignored, so that no code that it refers to is run.

        Returns:
            Names of weights that are missing in the file.

        Raises:
            ValueError: The path has another suffix, no layer in the file matches, or its weights are not in the file.
            OSError: The file cannot be read.
        """
        check_weights(Path(path), _suffix(Path(path)))
        scope = self._scope()
        before = dict(scope.state_mapping)
        with keras.device("cpu"), scope, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each skipped layer; the caller reports what is returned
            self.keras_model.load_weights(path, skip_mismatch=True)
        missing = [n for n, v in self._variables.items() if scope.get_current_value(v) is before[id(v)]]
        if len(missing) == len(self._variables):
            raise ValueError("no layer matches the model")
        self._update(scope, list(self._variables))
        return [name for name in missing if name not in self._seeds]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Reject compilation, as ``torch.compile`` has many graph breaks and recompilations in Keras code."""
        raise UnsupportedModelError("task.compile=true does not support Keras models; set task.compile=false")

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """Copy the state, and share the structure."""
        shared = [self.keras_model, self._global_seed, *self._variables.values()]
        memo |= {id(item): item for item in shared}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _check_dtype(self) -> None:
        for name, variable in self._variables.items():
            dtype = str(getattr(self, name).dtype).removeprefix("torch.")
            if dtype != variable.dtype:
                raise UnsupportedModelError(
                    f"trainer.precision converts the weights to {dtype}, but the Keras model was built for "
                    f"{variable.dtype}; try bf16-mixed or 32-true"
                )

    def _scope(self, *, collect_losses: bool = False) -> Any:
        """Return a scope in which the variables of the Keras model have the values of this module."""
        scope = keras.StatelessScope(collect_losses=collect_losses, initialize_variables=False)
        scope.state_mapping = {id(variable): getattr(self, name) for name, variable in self._variables.items()}
        return scope

    def _seed(self, scope: Any) -> None:
        variables = [self._global_seed, *(self._variables[name] for name in self._seeds)]
        seeds = torch.randint(2**31 - 1, (len(variables), 2), dtype=torch.int32)
        scope.state_mapping.update(zip(map(id, variables), seeds, strict=True))

    def _update(self, scope: Any, names: list[str]) -> None:
        """Copy the values that were assigned to variables in the scope."""
        with torch.no_grad():
            for name in names:
                value, own = scope.get_current_value(self._variables[name]), getattr(self, name)
                if value is not own:
                    own.copy_(value)


def check_weights(path: Path, suffix: str) -> None:
    """Check that all weights in a file are in it, before Keras reads them: HDF5 may take them from any other file.

    Raises:
        ValueError: They are in other files, or much larger than the file.
        OSError: The file cannot be read.
    """
    limit = expansion_limit(path)
    if suffix != ".keras":
        with path.open("rb") as file:
            _check_groups(h5py.File(file, "r"), limit)
        return
    with zipfile.ZipFile(path) as archive:
        if WEIGHTS not in archive.namelist():
            raise ValueError(f"it has no {WEIGHTS}")
        if archive.getinfo(WEIGHTS).file_size > limit:
            raise ValueError(f"its weights have more than {limit >> 20} MiB when they are expanded")
        _check_groups(h5py.File(io.BytesIO(archive.read(WEIGHTS)), "r"), limit)


def _check_groups(root: Any, limit: int) -> None:
    """Check all groups and datasets of an HDF5 file that is open, each once."""
    places, seen = [root], set[Any]()
    while places:
        group = places.pop()
        if group.id in seen:  # a group may hold itself
            continue
        seen.add(group.id)
        for name in group:
            if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
                raise ValueError(f"{name}: is in another file")
            found = group.get(name)
            if isinstance(found, h5py.Group):
                places.append(found)
            elif isinstance(found, h5py.Dataset):
                if found.external or found.is_virtual:
                    raise ValueError(f"{name}: its values are in another file")
                limit -= found.nbytes
    if limit < 0:
        raise ValueError("its weights are much larger than the file")


def check_model(model: keras.Model) -> None:
    """Raise ``ValueError`` if the model has no weights, or a part that training in torch would ignore."""
    if not model.built or not model.variables:
        raise ValueError(
            f"{type(model).__name__} has no weights before its first call; start it with keras.Input(…), or "
            "use boltcutter.model.keras_model.KerasModel with model.input_shape=${data.shape}"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            raise ValueError(
                f"{layer.name} wraps a torch module, whose buffers Keras does not save; use a model without Keras"
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(f"{layer.name} has an activity_regularizer, which the task ignores; remove it")
    for variable in model.variables:
        if variable.regularizer is not None:
            raise ValueError(f"{variable.path} has a regularizer, which the task ignores; remove it and set task.l2")
        if variable.constraint is not None:
            raise ValueError(f"{variable.path} has a constraint, which the optimizer ignores; remove it")


def variable_names(model: keras.Model) -> list[str]:
    """Return the paths of the model's variables, with automatic layer names numbered within the model.

    Keras numbers layers within the process, so that a second model of the same class may start with ``dense_3``.
    """
    explicit_names = {  # chosen by the model's author, rather than derived from the class
        layer.name
        for layer in model._flatten_layers()
        if COUNTER_SUFFIX.sub("", layer.name).replace("_", "") != type(layer).__name__.lower()
    }
    renamed: dict[tuple[str, ...], str] = {}  # by original path
    names: list[str] = []
    for variable in model.variables:
        *raw, last = variable.path.split("/")
        name = ""
        for depth, part in enumerate(raw, 1):
            prefix = tuple(raw[:depth])
            if prefix not in renamed:
                plain = part if part in explicit_names else COUNTER_SUFFIX.sub("", part)
                renamed[prefix] = _make_unique(f"{name}{plain}", set(renamed.values()))
            name = f"{renamed[prefix]}/"
        names.append(_make_unique(f"{name}{last}", set(names)))
    return names


def _make_unique(name: str, existing: set[str]) -> str:
    candidates = (name if count == 0 else f"{name}_{count}" for count in range(len(existing) + 1))
    return next(candidate for candidate in candidates if candidate not in existing)


def _suffix(path: Path) -> str:
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    raise ValueError(f"{path} is not a Keras file; its name must end in {' or '.join(SUFFIXES)}")
