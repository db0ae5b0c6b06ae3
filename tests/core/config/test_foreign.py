from pathlib import Path

import pytest

from boltcutter import extend
from boltcutter.cli.commands import main
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project


@pytest.mark.parametrize("override", ["callback=none", "datamodule=1", "callback={PATH}"])
def test_without_other_templates_errors_name_no_counterpart(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extend, "find", lambda offer: None)
    (tmp_path / "own.yaml").write_text("defaults:\n- callbacks: none\n")
    with pytest.raises(ConfigError, match=r"no such (option|key|argument)|Hydra's syntax; write callbacks: none"):
        compose(Project.find(__file__), [override.format(PATH=tmp_path / "own.yaml")])


def test_without_other_templates_an_unknown_command_has_no_counterpart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for find, remedy in ((extend.find, "; use train"), (lambda offer: None, " (there are: train")):
        monkeypatch.setattr(extend, "find", find)
        with pytest.raises(SystemExit):
            main(["fit"])
        assert f"error: fit: no such command{remedy}" in capsys.readouterr().err
