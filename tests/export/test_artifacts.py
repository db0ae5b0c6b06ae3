import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from wandb_server import ArtifactServer, artifact_server

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter_export import registry
from boltcutter_export.artifacts import parse


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactServer]:
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "5ec7e7" * 6 + "abcd")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv(registry.VARIABLE, "wandb://me/p")
    with artifact_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        wandb.teardown()  # W&B reads the environment once in a process: an earlier test may have used it
        yield found
        wandb.teardown()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "project").mkdir()
    return Project.at(tmp_path / "project")


@pytest.mark.slow
def test_versions_are_artifacts(server: ArtifactServer, project: Project, trained: Path) -> None:
    checkpoint = f"{trained}/checkpoints/best.ckpt"
    assert [registry.register(project, "digits", trained, checkpoint) for _ in range(2)] == [
        "registry:digits@v0",
        "registry:digits@v1",
    ]
    first, second = server.artifacts["digits"]
    assert first["artifactType"] == {"name": "model"}
    assert (first["names"], sorted(second["names"])) == ([], ["best", "latest"])  # of equal scores the latest
    record = json.loads((trained / "record.json").read_text())
    assert json.loads(first["metadata"])["run"] == record["id"]

    better = json.loads(second["metadata"])
    second["metadata"] = json.dumps(better | {"best": {**better["best"], "score": -1.0}})
    assert registry.register(project, "digits", trained, checkpoint) == "registry:digits@v2"
    assert (second["names"], server.artifacts["digits"][2]["names"]) == (["best"], ["latest"])

    found = Path(registry.find(project, "registry:digits@best"))
    assert found.name == "v1"
    assert (found / "checkpoints" / "best.ckpt").read_bytes() == Path(checkpoint).read_bytes()
    assert json.loads((found / "registered.json").read_text())["name"] == "digits"
    assert Path(registry.find(project, "registry:digits@v0")).name == "v0"
    with pytest.raises(ConfigError, match=r"registry:digits@v7: not in wandb://me/p; register it"):
        registry.find(project, "registry:digits@v7")
    with pytest.raises(ConfigError, match=r"registry:other@latest: not in wandb://me/p; register it"):
        registry.find(project, "registry:other")


@pytest.mark.slow
def test_what_is_missing_is_reported_in_one_line(
    server: ArtifactServer, project: Project, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match=r"^BOLTCUTTER_REGISTRY=wandb://me/p: WANDB_MODE=offline; unset it[^\n]*$"):
        registry.find(project, "registry:digits")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match=r"^BOLTCUTTER_REGISTRY=wandb://me/p: not logged in .*; run `wandb login`$"):
        registry.register(project, "digits", trained, f"{trained}/checkpoints/best.ckpt")
    monkeypatch.setenv("WANDB_API_KEY", "5ec7e7" * 6 + "abcd")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^BOLTCUTTER_REGISTRY=.*127\.0\.0\.1:9 is unreachable; try again"):
        registry.find(project, "registry:digits")


def test_the_entity_is_optional() -> None:
    assert parse("wandb://me/p") == ("me", "p")
    assert parse("wandb://p/") == (None, "p")
    for wrong in ("wandb://", "wandb://me/p/x", "wandb:///p"):
        with pytest.raises(ConfigError, match=r"not a W&B project; use wandb://<entity>/<project>"):
            parse(wrong)
