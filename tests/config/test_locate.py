import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer

from boltcutter.config.annotations import matches
from boltcutter.config.compose import compose, merge
from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import KERAS_ADAPTER, adapter, keeps_arguments, locate, origin, parameters, same_target
from boltcutter.project import Project

PROJECT = Project.find(__file__)
DEFAULT = "lightning.pytorch.Trainer"
ABSENT = "which is not installed; install the distribution that has no_such_package"
MISTAKES = {
    "import no_such_package": f"needs no_such_package, {ABSENT}",
    "import no_such_package.inner": f"needs no_such_package, {ABSENT}",
    "from pytorch_lightning.core.lightning import LightningModule": "needs pytorch_lightning.core.lightning, which the "
    "installed version of pytorch_lightning does not have; adapt the import to this version",
    "x = [1][3]": "list index out of range (IndexError at {file}:2)",
    "int('x')": "invalid literal for int() with base 10: 'x' (ValueError at {file}:2)",
    "def f(:": "invalid syntax (needy.py, line 2) (SyntaxError)",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_module_that_cannot_be_imported(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text(f"import os\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        locate("needy.Class")
    assert str(error.value).startswith("needy.Class")
    assert str(error.value).endswith(MISTAKES[code].format(file=tmp_path / "needy.py"))


def test_an_error_of_the_import_system_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled.pyc").write_bytes(bytes(16))  # by another version of Python
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"bad magic number in 'compiled': .* \(ImportError\)$"):
        locate("compiled.Class")


@pytest.mark.parametrize(
    ("path", "name"), [("torch.nn.Linear", "Linear"), ("pathlib.Path.home", "home"), ("json.loads", "loads")]
)
def test_what_a_path_names(path: str, name: str) -> None:
    found: Any = locate(path)
    assert found.__name__ == name


def test_keyword_arguments_that_are_passed_on() -> None:
    from lightning.pytorch.strategies import DDPStrategy

    known = parameters(DDPStrategy)
    assert {"find_unused_parameters", "gradient_as_bucket_view", "process_group_backend"} <= set(known)
    assert not any(p.kind is p.VAR_KEYWORD for p in known.values())


class Unreadable:
    """A callable whose signature cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    @property
    def __signature__(self) -> Any:
        raise self.error("no signature")

    def __call__(self) -> None: ...


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_callable_without_signature_takes_anything(error: type[Exception]) -> None:
    found = parameters(Unreadable(error))
    assert {name: p.kind.name for name, p in found.items()} == {"args": "VAR_POSITIONAL", "kwargs": "VAR_KEYWORD"}


def partly(number: int, other: "no_such_name") -> None:  # type: ignore[name-defined]  # noqa: F821
    """A function with an annotation that cannot be evaluated, beside one that is a type."""


def test_annotations_that_cannot_be_evaluated_are_any() -> None:
    assert [p.annotation for p in parameters(partly).values()] == [int, Any]


def test_keras_is_imported_with_the_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KERAS_BACKEND", "KERAS_TORCH_DEVICE"):
        monkeypatch.setenv(variable, "other")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    locate.__wrapped__("json.loads")
    assert (os.environ["KERAS_BACKEND"], os.environ["KERAS_TORCH_DEVICE"]) == ("torch", "cpu")


def test_the_place_of_an_error_is_that_of_the_package() -> None:
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads("{")
    assert re.search(r"^JSONDecodeError at .*json/decoder\.py:\d+$", origin(error.value, "json"))
    assert re.search(
        r"^JSONDecodeError at tests/.*test_locate\.py:\d+$", origin(error.value, __name__.partition(".")[0])
    )
    assert re.search(r"^JSONDecodeError at .*json/decoder\.py:\d+$", origin(error.value, "elsewhere"))


def test_the_classes_of_a_framework_are_wrapped_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))  # a folder of the name
    assert adapter(dict) is None
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__file__="keras.py", Model=dict))
    assert [adapter(dict), adapter(list), adapter({})] == [KERAS_ADAPTER, None, None]


class OwnTrainer(Trainer):
    """A trainer of a project."""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (DEFAULT, "lightning.pytorch.trainer.Trainer", True),
        (DEFAULT, "lightning.Trainer", True),
        (DEFAULT, "lightning.pytorch.trainer.trainer.Trainer", True),
        ("torch.optim.AdamW", "torch.optim.adamw.AdamW", True),
        ("torch.optim.AdamW", "torch.optim.Adam", False),
        ("lightning.pytorch.callbacks.ModelCheckpoint", "nowhere.ModelCheckpoint", False),
        ("boltcutter.strategy.ddp.DDPStrategy", "lightning.pytorch.strategies.DDPStrategy", False),
    ],
)
def test_targets_are_compared_as_classes(one: str, other: str, expected: bool) -> None:
    assert same_target(one, other) == same_target(other, one) == expected


def test_subclasses_of_the_trainer_take_its_arguments() -> None:
    assert keeps_arguments(DEFAULT, f"{__name__}.OwnTrainer")
    assert not keeps_arguments("torch.optim.Adam", "torch.optim.AdamW")  # a subclass, with other defaults
    assert not keeps_arguments(DEFAULT, "torch.nn.Linear")
    assert not keeps_arguments(None, DEFAULT)


@pytest.mark.parametrize("target", ["lightning.pytorch.trainer.Trainer", "lightning.Trainer", f"{__name__}.OwnTrainer"])
def test_defaults_stay_with_another_spelling(target: str, tmp_path: Path) -> None:
    option = tmp_path / "mine.yaml"
    option.write_text(f"defaults: default\n_target_: {target}\nmax_epochs: 3\n")
    experiment = tmp_path / "own.yaml"
    experiment.write_text(f"trainer:\n  _target_: {target}\n  max_epochs: 3\n")
    for overrides in ([f"trainer={option}"], [f"experiment={experiment}"], [f"trainer._target_={target}"]):
        trainer = compose(PROJECT, overrides).trainer
        assert trainer["_target_"] == target
        assert trainer["plugins"][0]["_target_"] == "boltcutter.checkpoint.checkpoint_io.AtomicCheckpointIO"
        assert trainer["gradient_clip_val"] == 1.0


def test_another_class_drops_the_arguments() -> None:
    adam = {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 1}
    assert merge(adam, {"_target_": "torch.optim.SGD"}) == {"_target_": "torch.optim.SGD", "_partial_": True}
    assert merge(adam, {"_target_": "torch.optim.adam.Adam"})["lr"] == 1


@pytest.mark.parametrize("place", ["", "lib"])
def test_a_module_beside_the_class_is_not_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "beside_pkg").mkdir()
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / "beside_pkg" / "net.py").write_text("import helper_of_mine\n")
    (tmp_path / place / "helper_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "beside_pkg"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"PYTHONPATH={re.escape(str(tmp_path / place))}$"):
        locate("net.Net")
    with pytest.raises(ConfigError, match=rf"no module named beside_pkg; .*PYTHONPATH={re.escape(str(tmp_path))}$"):
        locate("beside_pkg.Net")


def test_a_default_of_none_is_also_a_value() -> None:
    def build(kind: str = None, size: int = 1) -> None:  # type: ignore[assignment]  # noqa: RUF013
        """As much code of others is annotated."""

    known = parameters(build)
    assert matches(None, known["kind"].annotation)
    assert matches("a", known["kind"].annotation)
    assert not matches(None, known["size"].annotation)
