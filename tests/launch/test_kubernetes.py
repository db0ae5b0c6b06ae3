"""Runs on Kubernetes: settings, requests to the API server, and pods that are simulated by machines of namespaces."""

import base64
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from conftest import ROOT
from kubernetes.config import load_kube_config
from slurm_cluster import Launch

from boltcutter.config.errors import ConfigError
from boltcutter.launch import kubernetes, stored_runs
from boltcutter.launch.job import Job
from boltcutter.launch.kubernetes import KubernetesLauncher
from boltcutter.project import Project
from boltcutter.run import lineage

from .kubernetes_api import ApiServer, api_server, pod, status
from .test_library import git

SETTINGS: dict[str, Any] = {"image": "img:1", "storage": "/mnt/runs", "volumes": {"runs": "/mnt"}}
ARGUMENTS = ["launch=kubernetes", "launch.image=img:1", "launch.storage=/mnt/runs", "launch.volumes={runs: /mnt}"]
ARGUMENTS += ["trainer.accelerator=cpu", "name=digits"]
JOBS = "/apis/batch/v1/namespaces/vision/jobs"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grace": 5}, "launch.grace=5 is less than 30; try launch.grace=30"),
        ({"time": "90"}, "launch.time=90 is not a time limit"),
        ({"memory": "64"}, "launch.memory=64 is not a size with its unit; try 64Gi"),
        ({"memory": "64GB"}, "launch.memory=64GB is not a size with its unit; try 64Gi"),
        ({"shm_size": "lots"}, "launch.shm_size=lots is not a size with its unit"),
        ({"secrets": {"KEY": "wandb"}}, "launch.secrets.KEY: .* try launch.secrets='{KEY: <secret>/<key>}'"),
        ({"pod": {"restartPolicy": "Always"}}, "launch.pod.restartPolicy: set by launch and trainer; remove it"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: secrets must not be written"),
        ({"tags": {"a": "b\nc"}}, "launch.tags=.* has the control character"),
        ({"max_parallel": 0}, "launch.max_parallel=0 is less than 1; try launch.max_parallel=1"),
        ({"cpus": -1}, "launch.cpus=-1 is less than 0"),
        ({"max_restarts": -1}, "launch.max_restarts=-1 is less than 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KubernetesLauncher(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": None}, "launch.storage: not set"),
        ({"storage": "ftp://x"}, "launch.storage=ftp://x: the nodes cannot write there; use s3:// or gs:// or az://"),
        ({"image": None}, "launch.image: not set; give the image"),
        (
            {"volumes": {}},
            r"launch.storage=/mnt/runs is on no volume of the pods; mount one there with",
        ),
        ({"volumes": {"runs": "/mn"}}, "launch.storage=/mnt/runs is on no volume"),
    ],
)
def test_jobs_that_cannot_run_are_refused(settings: dict[str, Any], message: str, launch: Launch) -> None:
    job = Job("digits", ROOT / "runs/x/y", None, root=ROOT, code=ROOT / "runs/x/y/code")
    with pytest.raises(ValueError, match=message):
        KubernetesLauncher(**SETTINGS | settings).check(job)
    KubernetesLauncher(**SETTINGS).check(job)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setattr(stored_runs, "POLL_SECONDS", 0.02)
    with api_server(tmp_path) as (found, file):
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield found


@pytest.fixture
def launch(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Calls the launch command in a small project, whose library is installed."""
    (tmp_path / "bin" / "git").symlink_to(shutil.which("git", path=os.defpath))
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "train.py", root / "scripts")
    git(root, "init", "-q")
    git(root, "add", ".")
    monkeypatch.setattr(Project, "find", lambda *_: Project.at(root))
    monkeypatch.setattr(lineage, "is_editable", lambda: False)
    return launch


def test_a_run_is_submitted_followed_and_cancelled(server: ApiServer, launch: Launch, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, f"runs={tmp_path}/runs", "trainer.num_nodes=2", "trainer.devices=1"]
    assert launch(*arguments, "--dry-run").count("---\n") == 1
    assert not server.requests  # no request, and not even a kubeconfig file is needed
    server.pods = [pod("first", "Running"), pod("second", "Pending", index=1)]
    output = launch(*arguments)
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    name = f"digits-{folder.name}"
    job_id = f"vision/{name}@lab"
    assert f"job {job_id}, running, 1 pods: {folder}\n" in output
    assert json.loads((folder / "record.json").read_text())["launch"]["id"] == job_id

    job, service = yaml.safe_load_all((folder / "job.yaml").read_text())
    sent = server.sent("POST")
    assert [request.path.rpartition("/")[2] for request in sent] == ["jobs", "services", "configmaps"]
    assert all(request.query == {"fieldValidation": "Strict"} for request in sent)
    assert all("/namespaces/vision/" in request.path for request in sent)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "uid-0"}
    labels = {"app.kubernetes.io/name": "boltcutter", "app.kubernetes.io/instance": name}
    owned = {"name": name, "labels": labels, "ownerReferences": [owner]}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": owned}
    content = base64.b64decode(sent[2].body.pop("binaryData")["job.tar.xz"])
    assert [request.body for request in sent] == [job, service | {"metadata": owned}, config_map]
    assert content == (folder / "job.tar.xz").read_bytes()
    with tarfile.open(folder / "job.tar.xz") as archive:
        assert {"record.json", "config.yaml", "code/scripts/train.py"} <= set(archive.getnames())

    server.logs = {"first": [b"epoch 1\n", b"epoch 2\n"]}
    assert launch("logs", f"run={folder}") == "epoch 1\nepoch 2\n"
    assert "being deleted, 1 pods are saving" in launch("cancel", f"run={folder}")
    (deleted,) = server.sent("DELETE")
    assert (deleted.path, deleted.query) == (f"{JOBS}/{name}", {"propagationPolicy": "Foreground"})
    for _ in range(2):
        server.pods = []
        output = launch("status", f"run={folder}")
    assert f"job {job_id}, deleted" in output
    assert (folder / "code").is_dir()
    with pytest.raises(ConfigError, match=r"launch\.storage=/mnt/runs is a path on the nodes; copy the run from there"):
        launch("fetch", f"run={folder}")


def test_a_run_is_resumed_in_a_new_job(server: ApiServer, launch: Launch, tmp_path: Path) -> None:
    launch(*ARGUMENTS, f"folder={tmp_path}/run")
    job = next(iter(server.objects.values()))
    with pytest.raises(ConfigError, match=r"job vision/.*, pending; cancel it first"):
        launch(f"resume={tmp_path}/run")
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "R", "message": "m"}]}
    output = launch(f"resume={tmp_path}/run")
    assert ", pending: " in output
    sent = [(request.path.rpartition("/")[2], request.body["metadata"]["name"]) for request in server.sent("POST")]
    names = ("digits-run", "digits-run-2")
    assert sent == [(kind, name) for name in names for kind in ("jobs", "configmaps")]
    assert not server.sent("DELETE")


def test_a_job_that_was_submitted_by_hand_is_not_replaced(server: ApiServer, launch: Launch, tmp_path: Path) -> None:
    server.objects[f"{JOBS}/digits-run"] = {"metadata": {"name": "digits-run"}, "status": {}}
    with pytest.raises(ConfigError, match=r"launch=kubernetes: .*digits-run.* already exists; delete it"):
        launch(*ARGUMENTS, f"folder={tmp_path}/run")
    assert not server.sent("DELETE")


def test_a_job_is_submitted_as_a_whole_or_not_at_all(server: ApiServer, launch: Launch, tmp_path: Path) -> None:
    server.failures["POST", "/configmaps"] = (
        403,
        status(403, "Forbidden", "configmaps is forbidden", kind="configmaps"),
    )
    with pytest.raises(ConfigError, match="launch=kubernetes: 403 configmaps is forbidden; ask for the role"):
        launch(*ARGUMENTS, f"folder={tmp_path}/run")
    assert len(server.sent("DELETE")) == 1
    assert not (tmp_path / "run").exists()


def test_code_that_kubernetes_cannot_store_is_refused(
    server: ApiServer, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_CONFIG_MAP", 100)
    message = r"launch\.storage=/mnt/runs: the packed code has .* MB, but Kubernetes stores at most 1 MB with a job;"
    with pytest.raises(ConfigError, match=message):
        launch(*ARGUMENTS, f"folder={tmp_path}/run")
    assert not server.requests


def test_without_a_cluster_nothing_is_left_behind(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-such-file"))
    with pytest.raises(ConfigError, match="no cluster is configured"):
        launch(*ARGUMENTS, f"folder={tmp_path}/run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("condition", "status"), [("Complete", False), ("Failed", True)])
def test_the_exit_status_is_that_of_the_job(
    condition: str, status: bool, server: ApiServer, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = {"conditions": [{"type": condition, "status": "True"}]}
    submit = KubernetesLauncher.create

    def create(launcher: KubernetesLauncher, job: Job, file: Path) -> str:
        job_id = submit(launcher, job, file)
        server.objects[f"{JOBS}/digits-run"]["status"] = ended
        return job_id

    monkeypatch.setattr(KubernetesLauncher, "create", create)
    with pytest.raises(SystemExit) as exit:
        launch(*ARGUMENTS, f"folder={tmp_path}/run", "--wait")
    assert exit.value.code is status


def test_logs_of_replaced_pods_are_followed(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pod waits, runs, its connection is closed, the server is away, and another pod replaces it."""
    job: dict[str, Any] = {"metadata": {"name": "a"}, "status": {}}
    server.objects[f"{JOBS}/a"] = job
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    first, second, other = pod("x", "Running"), pod("y", "Running"), pod("z", "Running", index=1)
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    steps: list[Callable[[], Any]] = [
        lambda: server.pods.append(pod("x", "Pending", conditions=[unschedulable])),
        lambda: (server.pods.__setitem__(0, first), server.logs.update(x=[b"one\n"])),
        lambda: server.logs.update(x=[b"one\n", b"two\n"]),
        lambda: server.failures.update({("GET", "/pods"): (0, "")}),
        lambda: (server.failures.clear(), first["status"].update(phase="Failed")),
        lambda: (server.pods.extend([second, other]), server.logs.update(y=[b"three\n"])),
        # After 10 MB, kubelet starts a new file: https://kubernetes.io/docs/concepts/cluster-administration/logging.
        lambda: (server.logs.update(y=[b"three\n", b"four\n", b"five\n"]), server.rotated.update(y=1)),
        lambda: job.update(status=complete),
    ]
    steps.pop(0)()
    monkeypatch.setattr("boltcutter.launch.job.time", SimpleNamespace(sleep=lambda delay: delay and steps.pop(0)()))
    launcher = KubernetesLauncher(**SETTINGS)
    loaded = Mock(wraps=load_kube_config)
    monkeypatch.setattr("kubernetes.config.load_kube_config", loaded)
    assert "".join(launcher.logs("vision/a@lab", Path("/x"), follow=True)) == "one\ntwo\nthree\nfour\nfive\n"
    loaded.assert_called_once()  # a plugin for credentials may take a second
    notes = capsys.readouterr().err
    assert "Unschedulable: 0/3 nodes" in notes
    assert "note: launch=kubernetes: the API server of lab does not respond" in notes


def test_logs_of_a_run_on_a_volume_say_where_they_are(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Pods of a job are deleted with it."""
    ended = {"type": "Complete", "status": "True"}
    server.objects[f"{JOBS}/a"] = {"metadata": {"name": "a"}, "status": {"conditions": [ended]}}
    launcher = KubernetesLauncher(**SETTINGS)
    assert list(launcher.logs("vision/a@lab", Path("/x/runs/digits/one"), follow=True)) == []
    note = "note: the output of rank 0 is in /mnt/runs/digits/one/logs/rank-0.log, on a volume of the pods; copy it"
    assert capsys.readouterr().err == f"{note} from there\n"


@pytest.mark.parametrize("job_id", ["--all", "vision", "vision/-x", "../secrets/x@lab"])
def test_malformed_job_ids_are_refused(job_id: str, server: ApiServer) -> None:
    for query in (KubernetesLauncher().cancel, KubernetesLauncher().status):
        with pytest.raises(ValueError, match=r"record\.json"):
            query(job_id)
    assert not server.requests


def test_flags_of_yaml_become_text() -> None:
    launcher = KubernetesLauncher(annotations={"spot": True, "zone": 1})
    assert launcher.annotations == {"spot": "true", "zone": "1"}
    assert replace(Job("a", Path("/a"), None)).name == "a"
