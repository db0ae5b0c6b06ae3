import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.export import command
from boltcutter.export.formats import Int8
from boltcutter.export.onnx import Int4
from boltcutter.export.settings import Export
from boltcutter.project import Project


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"export=onnx: onnx is not installed; pip install 'boltcutter\[export"):
        command.read_settings(Project.find(__file__), ["export=onnx"])


def test_only_computing_in_int8_needs_torchao() -> None:
    assert Int8().packages == ()
    assert Int8(dynamic=True).packages == ("torchao",)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"export.max_drop=-1 .*; try"):
        Export({"int4": Int4()}, max_drop=-1)
    with pytest.raises(ValueError, match=r"export.formats: empty; choose formats"):
        Export()
    with pytest.raises(ValueError, match=r"export.push=me/digits: .*; add export=safetensors"):
        Export({"int4": Int4()}, push="me/digits")
