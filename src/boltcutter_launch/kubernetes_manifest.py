"""Manifests of Kubernetes: the objects of a job, from the templates ``kubernetes_spec`` and ``kubernetes_pod``."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter_launch.cloud import next_name, to_yaml
from boltcutter_launch.job import Job, render_yaml, seconds
from boltcutter_launch.ray_driver import PLAN, Plan
from boltcutter_launch.secret_reference import find_reader

if TYPE_CHECKING:
    from boltcutter_launch.kubernetes import KubernetesLauncher

CODE = "/etc/boltcutter"  # where a pod finds the packed code if the storage is a path
BUNDLE = "job.tar.xz"  # name of the packed code there
INSTANCE = "app.kubernetes.io/instance"  # label of all objects and pods of a job
PORT = 29500
RAY_TIMEOUT = 1800  # seconds to wait for the nodes of a RayJob, which an autoscaler may have to add
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Characters: operators append up to 15, and the name of a host has at most 63. Of a RayJob it is 47:
# https://github.com/ray-project/kuberay, MaxRayJobNameLength of ray-operator/controllers/ray/utils/constant.go.
MAX_NAME = 47
API = {  # group, version, plural and kind
    "job": ("batch", "v1", "jobs", "Job"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    "rayjob": ("ray.io", "v1", "rayjobs", "RayJob"),
}

Manifest = dict[str, Any]


def render(launcher: KubernetesLauncher, job: Job) -> str:
    """Render the manifests of a job as one YAML file."""
    name = object_name(job)
    space = f" -n {shlex.quote(launcher.namespace)}" if launcher.namespace else ""
    steps = [f"kubectl{space} apply -f {launcher.job_file}"]
    if launcher.code_in_config_map:
        steps.insert(0, f"kubectl{space} create configmap {name} --from-file={BUNDLE}")
    group, version, _, kind = API[launcher.kind]
    metadata: Manifest = {"name": name} | ({"namespace": launcher.namespace} if launcher.namespace else {})
    metadata["labels"] = labels(launcher, job)
    found = [{"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": _spec(launcher, job)}]
    if launcher.kind == "job" and job.nodes > 1:
        # A restarted pod is found before it is ready, as it becomes ready only when all have found each other.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}}
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
    return "---\n".join([to_yaml(found[0], *steps), *map(to_yaml, found[1:])])


def object_name(job: Job) -> str:
    """Return the name of the objects of a job, which is also a host name: it starts with a letter."""
    name = next_name(job, limit=MAX_NAME - 7)  # with space for what may come before and after it
    return name if name[0].isalpha() else f"run-{name}"


def labels(launcher: KubernetesLauncher, job: Job) -> dict[str, str]:
    """Return the labels of the objects and pods of a job."""
    return {"app.kubernetes.io/name": "boltcutter", INSTANCE: object_name(job)} | launcher.tags


def _spec(launcher: KubernetesLauncher, job: Job) -> Manifest:
    cpus = launcher.cpus or job.devices * (1 + job.num_workers)
    plan = Plan(
        folder=launcher.remote_folder(job.folder),
        command=launcher.command(job),
        nodes=job.nodes,
        devices=job.devices,
        gpus=job.gpus,
        cpus=max(1, int(cpus)) / job.devices,
        max_restarts=launcher.max_restarts,
        timeout=RAY_TIMEOUT,
        address="auto",
    )
    # CPUs are requested but not limited, since a limit slows processes down; the rest is both.
    limits: Manifest = dict(launcher.resources)
    limits |= {"memory": launcher.memory} if launcher.memory else {}
    limits |= {launcher.gpu_resource: job.devices} if job.gpus else {}
    values = {
        "own": launcher,
        "job": job,
        "name": object_name(job),
        "labels": labels(launcher, job),
        "command": [_literal(text) for text in launcher.command(job)],
        "env": _environment(launcher, job),
        "resources": {"requests": {"cpu": f"{cpus:g}"} | limits} | ({"limits": limits} if limits else {}),
        "rdma": any(re.search(r"rdma|efa|hca|infiniband", name) for name in launcher.resources),
        "volumes": _volumes(launcher, job),
        "runtime": to_yaml({"env_vars": {PLAN: json.dumps(asdict(plan))}}),
        "cpus": max(1, int(cpus)),
        "seconds": seconds,
    }
    pod, head = (_pod(**values | more) for more in ({}, {"resources": {"requests": {"cpu": "1"}}}))
    return dict(render_yaml(Path(__file__).with_name("kubernetes_spec.yaml.j2"), pod=pod, head=head, **values))


def _pod(**values: Any) -> Manifest:
    pod: Manifest = render_yaml(Path(__file__).with_name("kubernetes_pod.yaml.j2"), **values)
    return pod | {"spec": pod["spec"] | values["own"].pod}


def _environment(launcher: KubernetesLauncher, job: Job) -> list[Manifest]:
    """The variables of a container: of the run, of secrets of the namespace, and of the ranks of a job."""
    values: dict[str, object] = {**launcher.variables(job)}
    if launcher.user is not None:
        values = {"HOME": "/tmp", "USER": "boltcutter"} | values  # noqa: S108 - of an image that may not have this user
    own = {name: place.split("/") for name, place in launcher.secrets.items() if not find_reader(place)}
    found: list[Manifest] = [{"name": name, "value": _literal(str(value))} for name, value in values.items()]
    found += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}} for name, (of, key) in own.items()
    ]
    if launcher.kind != "job" or job.nodes == 1:
        return found
    name = object_name(job)
    ranks = {"WORLD_SIZE": job.nodes, "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": PORT}
    found.append({"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    return found + [{"name": name, "value": str(value)} for name, value in ranks.items()]


def _literal(text: str) -> str:
    """Escape what Kubernetes would take for a reference to a variable."""
    return text.replace("$", "$$")


def _volumes(launcher: KubernetesLauncher, job: Job) -> list[tuple[str, str, Manifest]]:
    """The volumes of a pod: the name of each, where it is mounted, and what it is."""
    shared: Manifest = {"medium": "Memory"} | ({"sizeLimit": launcher.shm_size} if launcher.shm_size else {})
    found: list[tuple[str, str, Manifest]] = [("shm", "/dev/shm", {"emptyDir": shared})]  # noqa: S108 - of a container
    if launcher.code_in_config_map:
        found.append(("code", CODE, {"configMap": {"name": object_name(job)}}))
    for number, (place, path) in enumerate(launcher.volumes.items()):
        is_claim = not place.startswith("/")
        source = {"persistentVolumeClaim": {"claimName": place}} if is_claim else {"hostPath": {"path": place}}
        found.append((f"volume-{number}", path, source))
    return found
