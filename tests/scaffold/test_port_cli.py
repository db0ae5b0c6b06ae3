from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter_scaffold.port_cli import convert_file, read_script, unnested

SCRIPT = """
from lightning.pytorch import cli
import pkg.models as models
from pkg.data import Own as Data
class Local: ...
cli.LightningCLI(models.Net, datamodule_class=Data)
parser.link_arguments("a.b", "model.c")
parser.link_arguments(("a", "b"), "model.d", compute_fn=f)
"""


def test_classes_and_links_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    classes, links = read_script(tmp_path / "main.py", tmp_path)
    assert classes == {"model": "pkg.models.Net", "data": "pkg.data.Own"}
    assert links == ["model.c"]


def test_settings_below_a_subcommand() -> None:
    assert unnested({"fit": {"model": 1}}) == {"model": 1}
    assert unnested({"model": 1}) == {"model": 1}


def test_a_model_without_a_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: model has no class_path"):
        convert_file({"model": {"lr": 1}}, {}, [], Path("x.yaml"))


def test_an_optimizer_beside_the_module() -> None:
    values = {"model": {"class_path": "m.Net"}, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}}
    experiment, note = convert_file(values | {"ckpt_path": "x.ckpt"}, {}, [], Path("x.yaml"))
    assert experiment["task"]["module"] == {"_target_": "m.Net"}
    assert experiment["task"]["optimizer"]["_partial_"]
    assert experiment["defaults"]["data"] is None
    assert "resume=" in note
