import pytest

from boltcutter.assembly.assemble import read_config
from boltcutter.assembly.checks import check_devices
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

PROJECT = Project.find(__file__)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        ([], 0, None),
        (["trainer.devices=2"], 0, None),
        (["trainer.devices=3"], 0, "trainer.devices=3: this machine has no GPU and 2 CPU cores"),
        (["trainer.devices=3", "trainer.accelerator=cpu"], 0, None),
        (["trainer.devices=3"], 2, "trainer.devices=3: this machine has 2 CUDA devices; try trainer.devices=2"),
        (["trainer.devices=2"], 2, None),
        (["trainer.accelerator=cuda"], 0, "this machine has no CUDA device; try trainer.accelerator=cpu"),
        (["trainer.accelerator=gpu", "trainer.devices=[0,1,2]"], 2, "has 2 CUDA devices; try trainer.devices=2"),
        (["trainer.accelerator=cuda", "trainer.devices=auto"], 1, None),
    ],
)
def test_devices_are_checked_against_the_machine(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpus: int, message: str | None
) -> None:
    cfg = read_config(PROJECT, overrides)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    if message is None:
        check_devices(cfg.trainer)
        return
    with pytest.raises(ConfigError) as error:
        check_devices(cfg.trainer)
    assert message in str(error.value)
