"""A Job as Kubernetes runs it: two pods with what their manifest says, and a controller that replaces failed ones."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import QUICK, ROOT, Script, saved_weights
from new_project import run

from boltcutter.config.values import last_of_each

from .kubernetes_api import api_server
from .nodes import Machine, Process, nodes

NAME = "digits-run"  # of the Job and its Service
HOSTS = [f"{NAME}-{index} {NAME}-{index}.{NAME}" for index in (0, 1)]  # as the Service makes them known
OVERRIDES = [*QUICK, "model=mlp", "trainer.max_epochs=5", "trainer.accelerator=cpu", "test=false"]


class Pod:
    """A pod of the Job.

    Args:
        machine: Where it runs.
        index: Its completion index.
        template: Its specification.
        files: Content of each ConfigMap, by file name, base64.
        volume: Folder behind the only persistent volume claim.
    """

    def __init__(self, machine: Machine, index: int, spec: dict[str, Any], files: dict[str, Any], volume: Path) -> None:
        (container,) = spec["containers"]
        sources = {part["name"]: part for part in spec["volumes"]}
        for mount in container["volumeMounts"]:
            source, path = sources[mount["name"]], mount["mountPath"]
            if "configMap" in source:
                for name, content in files[source["configMap"]["name"]].items():
                    machine.run("sh", "-c", f"mkdir -p {path} && base64 -d >{path}/{name}", text=content)
            elif "persistentVolumeClaim" in source:
                assert path == str(volume)
        env = {"PATH": "/usr/bin:/bin", "HOSTNAME": machine.host, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        env |= {"KUBERNETES_SERVICE_PORT": "443", "JOB_COMPLETION_INDEX": str(index)}
        annotations = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
        for variable in container["env"]:
            value = variable.get("value", "").replace("$$", "$")
            env[variable["name"]] = value or annotations[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        user, limits = spec["securityContext"], container["securityContext"]
        assert limits == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        shutil.chown(volume, user["runAsUser"], user["fsGroup"])
        machine.run("chmod", "o+x", "/root")  # Python may be there; not that of this machine
        as_user = ["setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", "--clear-groups"]
        command = [*as_user, "--no-new-privs", "--bounding-set=-all", *container["command"]]
        self._start = lambda: machine.start(command, env)
        self.process: Process = self._start()

    def replace(self) -> None:
        """Start the pod that replaces this one."""
        self.process = self._start()


def control(pods: list[Pod], spec: dict[str, Any], seconds: float = 240) -> int:
    """Replace failed pods, as the Job controller does, until all have succeeded; returns the failures that count."""
    failures, end = 0, time.monotonic() + seconds
    while any(pod.process.is_running or pod.process.wait(1) for pod in pods):
        assert time.monotonic() < end, [pod.process.output for pod in pods]
        for pod in pods:
            if pod.process.is_running or (status := pod.process.wait(1)) == 0:
                continue
            rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
            action = next((rule["action"] for rule in rules if status in rule["onExitCodes"]["values"]), "Count")
            assert action != "FailJob", pod.process.output
            failures += action == "Count"
            assert failures <= spec["backoffLimit"], pod.process.output
            pod.replace()
        time.sleep(0.1)
    return failures


@pytest.fixture(scope="module")
def whole(script: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of the same training on one machine without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = script("train", *OVERRIDES, "trainer=ddp", "trainer.devices=2", f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return saved_weights(folder)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The Job that is created on the cluster, and the files of its ConfigMap, which the code of a project fits into."""
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "train.py", project / "scripts")
    (project / "pyproject.toml").write_text("[tool.boltcutter]\n")
    run("git", "init", "-q", cwd=project)
    run("git", "add", ".", cwd=project)
    with api_server(tmp_path) as (server, file):
        monkeypatch.setenv("KUBECONFIG", str(file))
        settings = ["launch=kubernetes", "launch.image=img:1", f"launch.storage={tmp_path}/volume", "name=digits"]
        settings += [f"launch.volumes={{runs: {tmp_path}/volume}}", f"launch.python={sys.executable}"]
        settings += ["launch.environment={OMP_NUM_THREADS: '1'}"]  # sums depend on the number of threads
        settings += ["trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", f"folder={tmp_path}/runs/run"]
        run(sys.executable, "-m", "boltcutter", "launch", *last_of_each([*settings, *OVERRIDES]), cwd=project)
        job, _, config_map = (request.body for request in server.sent("POST"))
        yield job, {config_map["metadata"]["name"]: config_map["binaryData"]}
        assert next(yaml.safe_load_all((tmp_path / "runs/run/job.yaml").read_text())) == job


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("signal", "failures"), [("TERM", 0), ("KILL", 2)])
def test_pods_that_are_replaced_resume(
    signal: str, failures: int, submitted: tuple[Any, Any], whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """One pod is evicted, which saves the run, or killed: both are replaced, and the run ends as one without that."""
    job, files = submitted
    spec = job["spec"]
    volume = tmp_path / "volume"
    volume.mkdir()
    with nodes(2, hosts=HOSTS, volumes=[volume]) as machines:
        template = spec["template"]["spec"]
        pods = [Pod(machine, index, template, files, volume) for index, machine in enumerate(machines)]
        folder = volume / "runs" / "run"
        pods[1].process.wait_until((folder / "checkpoints" / "last.ckpt").is_file)
        pods[1].process.signal(signal)
        assert base64.b64encode((tmp_path / "runs/run/job.tar.xz").read_bytes()).decode() in files[NAME].values()
        assert failures <= control(pods, spec) <= 2 * failures
        reasons = [attempt["reason"] for attempt in json.loads((folder / "record.json").read_text())["attempts"]]
        assert reasons[-1] == "completed"
        assert len(reasons) > 1
        assert signal == "KILL" or "preempted by SIGTERM" in reasons[0]
        ours = saved_weights(folder)
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
