from pathlib import Path
from typing import Any

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import locate, parameters

MISTAKES = {
    "import no_such_package": "needs no_such_package, which is not installed; pip install no_such_package",
    "import no_such_package.inner": "needs no_such_package, which is not installed; pip install no_such_package",
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
