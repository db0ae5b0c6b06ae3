import copy
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Script, assert_same, require, run_command, run_forked, saved_weights
from forkserver import ForkServer
from torch import Tensor, nn

if sys.version_info < (3, 11):
    pytest.skip("Keras needs Python 3.11", allow_module_level=True)
require(install="pip install -c constraints.txt -e '.[keras]'", package="keras")

from boltcutter.checkpoint.weights import load_weights  # noqa: E402
from boltcutter.model.keras_model import KerasModel, UnsupportedModelError, check_weights, keras  # noqa: E402

h5py = pytest.importorskip("h5py")
layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # raised in Keras with NumPy 2

# User code without any import of this project; a run imports it from a folder on PYTHONPATH.
USER_MODULE = """
import keras
from keras import layers

def make(inputs=(1, 8, 8), dropout=0.2):
    return keras.Sequential([
        keras.Input(inputs),
        layers.Rescaling(1 / 255),
        layers.Flatten(),
        layers.Dense(16, activation="relu"),
        layers.BatchNormalization(momentum=0.9),
        layers.Dropout(dropout, seed=7),
        layers.GaussianNoise(0.1 * dropout),
        layers.Dense(10),
    ])

def plain():
    return keras.Sequential([keras.Input((1, 8, 8)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(10)])

def last():
    return make((8, 8, 1))

def unbuilt() -> keras.Model:
    return keras.Sequential([layers.Flatten(), layers.Dense(10)])
"""
OVERRIDES = ["logger=null", "report=false", "trainer.max_epochs=2", "trainer.accelerator=cpu", "~model"]
MAKE = ["+model._target_=user_keras.make", "callback=[default,ema,keras_file]", "callback.ema.decay=0.9"]
MAKE += ["callback.keras_file.formats=[keras,weights.h5]"]


class Attention(keras.Model):
    """A subclassed model with a list of layers, an explicit layer name, no input shape and no argument ``training``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(3)
        self.rest = [layers.Dense(2, name="mine_4"), layers.MultiHeadAttention(2, 3, dropout=0.1)]

    def call(self, x: Tensor) -> Tensor:
        hidden = self.rest[0](self.first(x))
        found: Tensor = self.rest[1](hidden, hidden)
        return found


def noisy(outputs: int = 2) -> keras.Model:
    """All kinds of state: weights, statistics, an explicit seed and an automatic one."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.GaussianNoise(0.5),
            layers.Dense(outputs),
        ]
    )


def test_weight_names_do_not_depend_on_other_models() -> None:
    first, second = KerasModel(noisy()), KerasModel(noisy())
    assert list(first.state_dict()) == list(second.state_dict())
    of_layers = {"dense": ("kernel", "bias"), "batch_normalization": ("gamma", "beta"), "dense_1": ("kernel", "bias")}
    assert [name for name, _ in first.named_parameters()] == [
        f"sequential/{layer}/{name}" for layer, names in of_layers.items() for name in names
    ]
    assert {name.split("/")[-1] for name, _ in first.named_buffers()} == {
        "moving_mean",
        "moving_variance",
        "seed_generator_state",
    }


def test_layers_of_another_model_have_stable_names() -> None:
    taken = [keras.Sequential([*noisy().layers[:-1], layers.Dense(3)]) for _ in range(2)]
    first, second = (KerasModel(model, input_shape=(4,)).state_dict() for model in taken)
    assert list(first) == list(second)


def test_explicit_names_are_kept() -> None:
    first, second = (KerasModel(Attention(), input_shape=(5, 4)) for _ in range(2))
    assert list(first.state_dict()) == list(second.state_dict())
    assert {"attention/mine_4/kernel", "attention/multi_head_attention/query/kernel"} <= first.state_dict().keys()
    assert first(torch.rand(3, 5, 4)).shape == (3, 5, 2)


def test_training_follows_the_mode_of_the_module() -> None:
    model, x = KerasModel(noisy()), torch.rand(16, 4)
    before = copy.deepcopy(model.state_dict())
    model.eval()
    assert torch.equal(model(x), model(x))
    torch.testing.assert_close(model(x), model.__dict__["keras_model"](x, training=False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.train()
    assert not torch.equal(model(x), model(x))
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert [name.split("/")[-1] for name in moved] == ["moving_mean", "moving_variance"]


def test_random_layers_depend_on_the_seed_of_the_step() -> None:
    model, x = KerasModel(noisy()), torch.rand(16, 4)

    def step(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = model(x)
        return found

    first, other, again = step(1), step(2), step(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_copies_have_separate_weights() -> None:
    model, x = KerasModel(noisy()), torch.rand(16, 4)
    copied = copy.deepcopy(model).eval()
    before = copied(x)
    copied.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model(x)
    assert torch.equal(copied(x), before)
    assert not torch.equal(model.eval()(x), before)
    copied(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_layers_are_frozen_parameters() -> None:
    built = noisy()
    built.layers[0].trainable = False
    model = KerasModel(built)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"sequential/dense/kernel", "sequential/dense/bias"}


def test_channels_first_data() -> None:
    built = keras.Sequential([keras.Input((6, 5, 3)), layers.Conv2D(7, 3, padding="same")])
    moved, x = KerasModel(built, channels_first=True), torch.rand(2, 3, 6, 5)
    assert moved(x).shape == (2, 7, 6, 5)
    torch.testing.assert_close(moved(x), built(x.movedim(1, -1)).movedim(-1, 1))


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_keras_files_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    model, other, x = KerasModel(noisy()), KerasModel(noisy()), torch.rand(16, 4)
    model(x)
    model.save(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert load_weights(other, tmp_path / name) == []
    assert torch.equal(model.eval()(x), other.eval()(x))
    if name.endswith(".keras"):
        torch.testing.assert_close(keras.models.load_model(tmp_path / name)(x), model(x))


def test_missing_weights_in_a_file_are_reported(tmp_path: Path) -> None:
    KerasModel(noisy()).save(tmp_path / "model.keras")
    assert load_weights(KerasModel(noisy(9)), tmp_path / "model.keras") == [
        "2 missing: sequential/dense_1/kernel, sequential/dense_1/bias"
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.Sequential([layers.Dense(2)]), r"no weights .*keras.Input"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2, kernel_regularizer="l2")]), r"kernel.*task.l2"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2, kernel_constraint="non_neg")]), r"constraint"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2, activity_regularizer="l2")]), r"activity"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.TorchModuleWrapper(nn.Linear(2, 2))]), r"torch module"),
    ],
    ids=["unbuilt", "regularizer", "constraint", "activity", "torch"],
)
def test_parts_that_training_would_ignore_are_refused(make: Callable[[], keras.Model], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KerasModel(make())


def test_a_loss_of_a_layer_is_refused() -> None:
    class Adding(layers.Layer):
        def call(self, x: Tensor) -> Tensor:
            self.add_loss(x.mean())
            return x

    model = KerasModel(keras.Sequential([keras.Input((2,)), layers.Dense(2), Adding()]))
    with pytest.raises(UnsupportedModelError, match="add_loss"):
        model(torch.rand(3, 2))


def test_another_dtype_than_that_of_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^trainer.precision .*bfloat16.*float32.*bf16-mixed"):
        KerasModel(noisy()).bfloat16()(torch.rand(3, 4))


@pytest.mark.slow
def test_a_compiler_is_refused(script: Script, user_env: dict[str, str], tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "+model._target_=user_keras.plain", "task.compile=true", f"folder={tmp_path}/run"]
    done = script("train", *overrides, env=user_env)
    assert done.returncode
    assert "task.compile=true" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ValueError, match=r"^KERAS_BACKEND=jax.*KERAS_BACKEND=torch$"):
        KerasModel(noisy())


@pytest.mark.slow
def test_another_backend_is_refused_in_one_line_and_nothing_else_imports_keras(tmp_path: Path) -> None:
    before = "import os, sys\nassert 'keras' not in sys.modules\nos.environ['KERAS_BACKEND'] = 'numpy'\n"
    (tmp_path / "other.py").write_text(before + USER_MODULE)
    command = [sys.executable, "scripts/train.py", "--check", "~model", "+model._target_=other.unbuilt"]
    done = run_command(command, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "KERAS_BACKEND=numpy" in line
    assert "KERAS_BACKEND=torch" in line


@pytest.fixture(scope="module")
def user_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which runs import the user's module."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_keras.py").write_text(USER_MODULE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}


@pytest.fixture(scope="module")
def trained(script: Script, user_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a user's function with EMA and Keras files; tests must not modify it."""
    folder = tmp_path_factory.mktemp("keras") / "run"
    done = script("train", *OVERRIDES, *MAKE, f"folder={folder}", env=user_env)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_function_that_returns_a_keras_model_trains(trained: Path) -> None:
    assert json.loads((trained / "record.json").read_text())["test"]["test/accuracy"] > 0.2  # by chance 0.1
    assert "model.sequential/dense/kernel" in saved_weights(trained)


def test_the_best_model_is_saved_beside_its_checkpoint(trained: Path) -> None:
    best = saved_weights(trained, "best")
    folder = trained / "checkpoints"
    model = keras.models.load_model(folder / "best.keras")
    assert torch.equal(model.layers[-1].kernel.value, best["model.sequential/dense_1/kernel"])
    model.load_weights(folder / "best.weights.h5")
    assert torch.equal(model.layers[-1].kernel.value, best["model.sequential/dense_1/kernel"])


@pytest.mark.slow
def test_a_run_is_evaluated_and_reproduced(
    script: Script, user_env: dict[str, str], trained: Path, tmp_path: Path
) -> None:
    record = json.loads((trained / "record.json").read_text())
    done = script("evaluate", f"run={trained}", f"output={tmp_path}/test", env=user_env)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "test" / "metrics.json").read_text()) == record["test"]
    done = script("train", f"reproduce={trained}", f"folder={tmp_path}/again", env=user_env)
    assert done.returncode == 0, done.stderr
    again, then = saved_weights(tmp_path / "again"), saved_weights(trained)
    assert all(torch.equal(again[name], then[name]) for name in then)


@pytest.mark.slow
def test_a_run_that_is_stopped_in_an_epoch_ends_with_the_same_weights(
    script: Script, forks: ForkServer, user_env: dict[str, str], trained: Path, tmp_path: Path
) -> None:
    argv = ["tests/faulty.py", "SIGTERM", "training", "scripts/train.py", *OVERRIDES, *MAKE, f"folder={tmp_path}/run"]
    assert run_forked(forks, argv, env=user_env).returncode == 128 + 15
    done = script("train", f"resume={tmp_path}/run", env=user_env)
    assert done.returncode == 0, done.stderr
    resumed, completed = saved_weights(tmp_path / "run"), saved_weights(trained)
    assert resumed.keys() == completed.keys()
    assert all(torch.equal(resumed[name], completed[name]) for name in completed)


@pytest.mark.slow
def test_two_ranks_equal_one_process(script: Script, user_env: dict[str, str], tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "+model._target_=user_keras.plain"]
    for name, more in (("one", []), ("two", ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"])):
        done = script("train", *overrides, *more, f"folder={tmp_path}/{name}", env=user_env, ranks=len(more) and 2)
        assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_training_starts_from_a_keras_file(
    script: Script, user_env: dict[str, str], trained: Path, tmp_path: Path
) -> None:
    start = [f"init_from={trained}/checkpoints/best.keras", "trainer.max_steps=1", "optimizer.lr=0", "callback=default"]
    overrides = [*OVERRIDES, "+model._target_=user_keras.make", *start, f"folder={tmp_path}/run"]
    done = script("train", *overrides, env=user_env)
    assert done.returncode == 0, done.stderr
    name = "model.sequential/dense/kernel"
    assert torch.equal(saved_weights(tmp_path / "run")[name], saved_weights(trained, "best")[name])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+model._target_=user_keras.unbuilt"], r"no weights.*model.input_shape"),
        (["+model._target_=torch.nn.Flatten", "callback=[default,keras_file]"], r"callback.keras_file.*model=Flatten"),
    ],
    ids=["unbuilt", "callback"],
)
def test_mistakes_are_reported_in_one_line(
    script: Script, user_env: dict[str, str], overrides: list[str], message: str
) -> None:
    done = script("train", "--check", "~model", *overrides, env=user_env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search(message, line)


@pytest.mark.slow
def test_the_wrapper_builds_a_model_and_moves_channels(script: Script, user_env: dict[str, str]) -> None:
    inner = ["+model._target_=boltcutter.model.keras_model.KerasModel", "+model.input_shape=${data.shape}"]
    inner += ["+model.channels_first=true", "+model.model._target_=user_keras.unbuilt"]
    done = script("train", "--check", "~model", *inner, env=user_env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["size", "link", "external", "virtual"])
def test_weights_of_somebody_else_are_in_the_file(kind: str, tmp_path: Path) -> None:
    model = KerasModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    model.save(file := tmp_path / "a.weights.h5")
    check_weights(file, ".weights.h5")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.ones((4, 2), "float32")
    with h5py.File(file, "r+") as opened:
        place = opened["layers/dense/vars"]
        del place["0"]
        if kind == "size":
            place.create_dataset("0", (1 << 40, 2), "float32", chunks=(1, 2))
        elif kind == "link":
            place["0"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
        elif kind == "external":
            place.create_dataset("0", (4, 2), "float32", external=[("/etc/hostname", 0, 32)])
        else:
            layout = h5py.VirtualLayout((4, 2), "float32")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (4, 2))
            place.create_virtual_dataset("0", layout)
    with pytest.raises(ValueError, match=r"another file|larger than the file"):
        model.load(file)
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.write(file, "model.weights.h5")
    with pytest.raises(ValueError, match=r"another file|larger than the file"):
        model.load(tmp_path / "a.keras")
