import pytest

from boltcutter.config.errors import ConfigError
from boltcutter_export.formats import Int8
from boltcutter_export.onnx import Int4, StaticInt8
from boltcutter_export.settings import Export, Format


def test_a_missing_package_is_named_with_its_install_command() -> None:
    class Missing(Format):
        packages = ("json", "no_such_package")

        def write(self, *arguments: object) -> None:
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"export=x: no_such_package is not installed; pip install 'boltcutter\[export"
    ):
        Missing().check_packages("x")


def test_only_computing_in_int8_needs_torchao() -> None:
    assert Int8().packages == ()
    assert Int8(dynamic=True).packages == ("torchao",)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"export.max_drop=-1 .*; try"):
        Export({"int4": Int4()}, max_drop=-1)
    with pytest.raises(ValueError, match=r"block_size=48 .*; try 32"):
        Int4(block_size=48)
    with pytest.raises(ValueError, match=r"samples=0 .*; try 256"):
        StaticInt8(samples=0)
    with pytest.raises(ValueError, match=r"export.formats: empty; choose formats, or register"):
        Export()
    with pytest.raises(ValueError, match=r"export.push=me/digits: .*; add export=safetensors"):
        Export({"int4": Int4()}, push="me/digits")
