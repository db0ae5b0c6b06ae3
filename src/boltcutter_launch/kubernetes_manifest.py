"""Manifests of Kubernetes: the objects of a job, one renderer for each kind of job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from boltcutter_launch.cloud import drop_unset, next_name, to_yaml
from boltcutter_launch.job import Job, seconds
from boltcutter_launch.ray_driver import PLAN, Plan
from boltcutter_launch.secret_reference import find_reader

if TYPE_CHECKING:
    from boltcutter_launch.kubernetes import KubernetesLauncher

CODE = "/etc/boltcutter"  # where a pod finds the packed code if the storage is a path
BUNDLE = "job.tar.xz"  # name of the packed code there
INSTANCE = "app.kubernetes.io/instance"  # label of all objects and pods of a job
PORT = 29500
RAY_TIMEOUT = 1800  # seconds to wait for the nodes of a RayJob, which an autoscaler may have to add
RAY_PROBE = {  # the port is that of Ray's agent on each node; training may occupy all CPUs
    "httpGet": {"path": "/api/local_raylet_healthz", "port": 52365},
    **{"initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 120},
}
PREEMPTED, INVALID = 143, 2  # exit statuses of the training: saved after SIGTERM, a mistake in the configuration
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Characters: operators append up to 15, and the name of a host has at most 63. Of a RayJob it is 47:
# https://github.com/ray-project/kuberay, MaxRayJobNameLength of ray-operator/controllers/ray/utils/constant.go.
MAX_NAME = 47
API = {  # group, version, plural and kind
    "job": ("batch", "v1", "jobs", "Job"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    "rayjob": ("ray.io", "v1", "rayjobs", "RayJob"),
}
CONTAINERS = {"trainjob": "node"}  # name that the operator expects

Manifest = dict[str, Any]


def render(launcher: KubernetesLauncher, job: Job) -> str:
    """Render the manifests of a job as one YAML file."""
    name = object_name(job)
    space = f" -n {launcher.namespace}" if launcher.namespace else ""
    steps = [f"kubectl{space} apply -f {launcher.job_file}"]
    if launcher.code_in_config_map:
        steps.insert(0, f"kubectl{space} create configmap {name} --from-file={BUNDLE}")
    first, *others = manifests(launcher, job)
    return "---\n".join([to_yaml(first, *steps), *map(to_yaml, others)])


def object_name(job: Job) -> str:
    """Return the name of the objects of a job, which is also a host name: it starts with a letter."""
    name = next_name(job, limit=MAX_NAME - 7)  # with space for what may come before and after it
    return name if name[0].isalpha() else f"run-{name}"


def manifests(launcher: KubernetesLauncher, job: Job) -> list[Manifest]:
    """Return the objects of a job, the job itself first."""
    name = object_name(job)
    spec = {"job": _job, "trainjob": _train_job, "rayjob": _ray_job}[launcher.kind]
    found = [_object(launcher, job, *API[launcher.kind], spec(launcher, job))]
    if launcher.kind == "job" and job.nodes > 1:
        # A restarted pod is found before it is ready, as it becomes ready only when all have found each other.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}}
        found.append(_object(launcher, job, "", "v1", "services", "Service", service))
    return found


def _object(
    launcher: KubernetesLauncher, job: Job, group: str, version: str, _: str, kind: str, spec: Manifest
) -> Manifest:
    metadata: Manifest = {"name": object_name(job)}
    if launcher.namespace:
        metadata["namespace"] = launcher.namespace
    metadata["labels"] = labels(launcher, job)
    return {"apiVersion": f"{group}/{version}".lstrip("/"), "kind": kind, "metadata": metadata, "spec": spec}


def labels(launcher: KubernetesLauncher, job: Job) -> dict[str, str]:
    """Return the labels of the objects and pods of a job."""
    return {"app.kubernetes.io/name": "boltcutter", INSTANCE: object_name(job)} | launcher.tags


def _job(launcher: KubernetesLauncher, job: Job) -> Manifest:
    """An Indexed Job: a pod that fails is replaced by one with the same index, rank and host name.

    The processes of the other pods then fail or exit too, as the ranks of a run wait for each other, so that all are
    replaced. Each of them counts, unless the run was preempted. In an array, each index is a run, whose failure does
    not end the others.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index.
    """
    name, size = object_name(job), job.array_size
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_status(PREEMPTED)},
        {"action": "FailIndex" if size else "FailJob", "onExitCodes": _exit_status(INVALID)},
    ]
    ranks: list[Manifest] = []
    pod: Manifest = {"restartPolicy": "Never"}
    if job.nodes > 1:
        pod["subdomain"] = name
        ranks = [
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            *_variables({"WORLD_SIZE": job.nodes, "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": PORT}),
        ]
    restarts = launcher.max_restarts
    return {
        "completionMode": "Indexed",
        "completions": size or job.nodes,
        "parallelism": min(launcher.max_parallel or size, size) or job.nodes,
        **({"backoffLimitPerIndex": restarts} if size else {"backoffLimit": restarts * job.nodes}),
        "podFailurePolicy": {"rules": rules},
        "template": _template(launcher, job, pod | _pod(launcher, job, ranks)),
        **_time_limit(launcher),
        "ttlSecondsAfterFinished": int(86400 * launcher.keep_days),
    }


def _exit_status(status: int) -> Manifest:
    return {"containerName": "train", "operator": "In", "values": [status]}


def _train_job(launcher: KubernetesLauncher, job: Job) -> Manifest:
    """A TrainJob of Kubeflow Trainer, as a patch of a training runtime that the cluster has."""
    pod = _pod(launcher, job, [])
    (container,) = pod["containers"]
    trainer = {name: container.pop(name) for name in ("image", "command", "env", "resources") if name in container}
    trainer |= {"numNodes": job.nodes, "numProcPerNode": job.devices, "resourcesPerNode": trainer.pop("resources")}
    for name in ("enableServiceLinks", "automountServiceAccountToken"):
        pod.pop(name, None)  # not part of a patch
    jobs = [{"name": "node", "template": {"spec": {"template": _template(launcher, job, pod)}}}]
    patch = {"manager": "boltcutter/launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    return _time_limit(launcher) | {
        "runtimeRef": {"name": launcher.runtime},
        "trainer": trainer,
        "runtimePatches": [patch],
    }


def _ray_job(launcher: KubernetesLauncher, job: Job) -> Manifest:
    """A RayJob of KubeRay: a head without resources, on which the driver runs, and a worker for each node of the run.

    KubeRay submits the run by HTTP: otherwise, a pod without these settings runs `ray job submit` in a shell. It also
    checks nodes by wget, which images may lack: https://github.com/ray-project/kuberay/issues/2063.

    Source: https://ray-project.github.io/kuberay/reference/api/ (RayJobSpec, RayClusterSpec).
    """
    pod = _pod(launcher, job, [])
    (container,) = pod["containers"]
    container.pop("command")
    container |= dict.fromkeys(("livenessProbe", "readinessProbe"), RAY_PROBE)
    cpus, gpus = float(container["resources"]["requests"]["cpu"]), job.devices if job.gpus else 0
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
    head = pod | {"containers": [container | {"resources": {"requests": {"cpu": "1"}}}]}
    workers = {
        "groupName": "nodes",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes),
        "rayStartParams": {"num-cpus": str(max(1, int(cpus))), "num-gpus": str(gpus)},
        "template": _template(launcher, job, pod),
    }
    return {
        "submissionMode": "HTTPMode",
        "entrypoint": f"{launcher.python} -m boltcutter_launch.ray_driver",
        "runtimeEnvYAML": to_yaml({"env_vars": {PLAN: json.dumps(asdict(plan))}}),
        "shutdownAfterJobFinishes": True,
        **_time_limit(launcher),
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _template(launcher, job, head)},
            "workerGroupSpecs": [workers],
        },
    }


def _time_limit(launcher: KubernetesLauncher) -> Manifest:
    return {"activeDeadlineSeconds": seconds(launcher.time)} if launcher.time else {}


def _template(launcher: KubernetesLauncher, job: Job, pod: Manifest) -> Manifest:
    # A sidecar of Istio, as in namespaces of Kubeflow, intercepts the connections between ranks and never ends.
    metadata: Manifest = {"labels": {"sidecar.istio.io/inject": "false"} | labels(launcher, job)}
    return {"metadata": metadata | ({"annotations": launcher.annotations} if launcher.annotations else {}), "spec": pod}


def _pod(launcher: KubernetesLauncher, job: Job, ranks: list[Manifest]) -> Manifest:
    volumes, mounts = _volumes(launcher, job)
    user: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    environment = launcher.variables(job)
    if launcher.user is not None:
        user |= {"runAsNonRoot": True, "runAsUser": launcher.user, "runAsGroup": launcher.user}
        user |= {"fsGroup": launcher.user, "fsGroupChangePolicy": "OnRootMismatch"}
        environment = {"HOME": "/tmp", "USER": "boltcutter"} | environment  # noqa: S108 - of an image that may not have this user
    own = {name: place.split("/") for name, place in launcher.secrets.items() if not find_reader(place)}
    keys = [{"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}} for name, (of, key) in own.items()]
    capabilities: Manifest = {"drop": ["ALL"]}
    if any(re.search(r"rdma|efa|hca|infiniband", name) for name in launcher.resources):
        capabilities["add"] = ["IPC_LOCK"]  # to register memory with the network adapter
    container: Manifest = {
        "name": CONTAINERS.get(launcher.kind, "train"),
        "image": launcher.image,
        "command": [_literal(text) for text in launcher.command(job)],
        "env": [*_variables(environment), *keys, *ranks],
        "resources": _resources(launcher, job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
    }
    pod: Manifest = {
        "terminationGracePeriodSeconds": launcher.grace,
        "enableServiceLinks": False,  # a service named "master" would set MASTER_PORT
        "serviceAccountName": launcher.service_account,
        "automountServiceAccountToken": None if launcher.service_account else False,
        "imagePullSecrets": [{"name": name} for name in launcher.image_pull_secrets],
        "nodeSelector": launcher.node_selector,
        "tolerations": [_toleration(text) for text in launcher.tolerations],
        "securityContext": user,
        "containers": [drop_unset(container)],
        "volumes": volumes,
    }
    return drop_unset(pod) | launcher.pod


def _variables(values: Mapping[str, object]) -> list[Manifest]:
    return [{"name": name, "value": _literal(str(value))} for name, value in values.items()]


def _literal(text: str) -> str:
    """Escape what Kubernetes would take for a reference to a variable."""
    return text.replace("$", "$$")


def _resources(launcher: KubernetesLauncher, job: Job) -> Manifest:
    """CPUs are requested but not limited, since a limit slows processes down; the rest is both."""
    limits: Manifest = dict(launcher.resources)
    if launcher.memory:
        limits["memory"] = launcher.memory
    if job.gpus:
        limits[launcher.gpu_resource] = job.devices
    cpus = f"{launcher.cpus or job.devices * (1 + job.num_workers):g}"
    return {"requests": {"cpu": cpus} | limits} | ({"limits": limits} if limits else {})


def _toleration(text: str) -> Manifest:
    """Convert a taint such as nvidia.com/gpu:NoSchedule or team=vision:NoSchedule to a toleration."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key} | ({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})
    return found | ({"effect": effect} if effect else {})


def _volumes(launcher: KubernetesLauncher, job: Job) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes of a pod, and where its container mounts them."""
    shared: Manifest = {"medium": "Memory"} | ({"sizeLimit": launcher.shm_size} if launcher.shm_size else {})
    found: list[tuple[str, str, Manifest]] = [("shm", "/dev/shm", {"emptyDir": shared})]  # noqa: S108 - of a container
    if launcher.code_in_config_map:
        found.append(("code", CODE, {"configMap": {"name": object_name(job)}}))
    for number, (place, path) in enumerate(launcher.volumes.items()):
        is_claim = not place.startswith("/")
        source = {"persistentVolumeClaim": {"claimName": place}} if is_claim else {"hostPath": {"path": place}}
        found.append((f"volume-{number}", path, source))
    return [{"name": name, **source} for name, _, source in found], [
        {"name": name, "mountPath": path} for name, path, _ in found
    ]
