"""Launch runs on Kubernetes: as a Job, or as a TrainJob of Kubeflow."""

from __future__ import annotations

import gzip
import lzma
import re
import shlex
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from boltcutter import run_files
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.errors import one_line
from boltcutter.launch.cloud_job import CloudLauncher, as_text, next_name, to_yaml
from boltcutter.launch.job import Job, Status, render_yaml, seconds
from boltcutter.launch.kubernetes_cluster import API, INSTANCE, Cluster, Manifest, describe, has_index, summarize
from boltcutter.launch.secret_reference import find_reader
from boltcutter.launch.stored_runs import LOG

CODE = "/etc/boltcutter"  # where a pod finds the packed code if the storage is a path
PACKED = "job.tar.xz"  # name of the packed code there
MAX_CONFIG_MAP = 1024 * 1024  # bytes
PORT = 29500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
MAX_NAME = 48  # characters: operators append up to 15, and the name of a host has at most 63
RESERVED = {"containers", "restartPolicy", "volumes", "subdomain", "terminationGracePeriodSeconds"}
# https://karpenter.sh/docs/concepts/disruption/#pod-level-controls, and the FAQ of the Cluster Autoscaler
KEEP = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"


@dataclass(kw_only=True, eq=False)
class KubernetesLauncher(CloudLauncher):
    """Submit runs to Kubernetes; the numbers of nodes, devices and GPUs are those of the trainer.

    Args:
        storage: Parent URL of the runs, such as s3://bucket/runs, or a path on one of the volumes.
        kind: Object to create; trainjob needs Kubeflow Trainer on the cluster.
        context: Context of the kubeconfig file; null: the current one.
        namespace: Namespace; null: that of the context.
        runtime: Training runtime of a trainjob.
        image: Container image with Python, the library and the project's dependencies.
        cpus: CPUs of each node; null: one for each process plus one for each dataloader worker.
        memory: Memory of each node with its unit, such as 64Gi; null: unlimited.
        shm_size: Limit of the shared memory of each node, such as 8Gi; it is part of its memory.
        gpu_resource: Name of the resource that is one GPU.
        resources: Further resources of each node, such as {"rdma/hca": 1}.
        max_restarts: How often the run is started again after a failure; preemptions do not count.
        grace: Seconds between SIGTERM, on which the run saves, and SIGKILL.
        time: Time limit of the job, H:MM:SS or D-HH:MM:SS; null: none.
        volumes: Persistent volume claims or folders of the nodes, and where each is mounted: {"runs": "/mnt/runs"}.
        secrets: Environment variables that hold secrets, and where each is: <secret>/<key> of the namespace, such as
            {"WANDB_API_KEY": "wandb/key"}, or a secret of a cloud, which each node reads by its own identity.
        user: User and group ID of the processes; null: those of the image.
        annotations: Annotations of the pods; by default, autoscalers do not evict them to save nodes.
        pod: Further fields of the pod specification, such as {"serviceAccountName": "train", "nodeSelector": {"gpu":
            "h200"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}.
        tags: Labels of objects and pods, such as a queue of Kueue.
        array: Overrides in which the runs of an array differ, such as "seed=1,2;optimizer.lr=0.1,0.01".
        max_parallel: Maximum number of runs of an array at the same time.
    """

    option, takes_path, index_variable = "kubernetes", True, "JOB_COMPLETION_INDEX"
    # Namespace, name, index in an array, and context.
    id_form = rf"({NAME})/({NAME})(?::([0-9]+))?@(.*)", "<namespace>/<name>@<context>"
    search_hint = "see kubectl get {own.kind}s"
    own_secret, secret_example = r"[a-z0-9.-]+/[\w.-]+", "<secret>/<key>"
    forms: ClassVar = dict.fromkeys(("memory", "shm_size"), (r"[0-9.]+[KMGTPE]i?", "a size with its unit; try 64Gi"))
    ranges: ClassVar = {"grace": (30, None), "cpus": (0, None), "max_parallel": (1, None)}  # time to save

    kind: Literal["job", "trainjob"] = "job"
    context: str | None = None
    namespace: str | None = None
    runtime: str = "torch-distributed"
    image: str | None = None
    cpus: float | None = None
    memory: str | None = None
    shm_size: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    resources: dict[str, Any] = field(default_factory=dict)
    max_restarts: int = 10
    grace: int = 120
    time: str | None = None  # type: ignore[assignment]
    volumes: dict[str, str] = field(default_factory=dict)
    user: int | None = 1000
    annotations: dict[str, str] = field(default_factory=lambda: dict(KEEP))
    pod: dict[str, Any] = field(default_factory=dict)
    array: str | list[str] | None = None
    max_parallel: int | None = None

    def __post_init__(self) -> None:
        self.resources, self.annotations = as_text(self.resources), as_text(self.annotations)
        super().__post_init__()
        self._connect = cache(Cluster)  # which renews credentials that expire by itself
        if wrong := sorted(RESERVED & self.pod.keys()):
            raise ValueError(f"launch.pod.{wrong[0]}: set by launch and trainer; remove it")

    @property
    def spot(self) -> bool:  # type: ignore[override]
        """Whether pods may be on spot nodes, which clouds and Karpenter label so."""
        return "spot" in str([self.pod.get(name) for name in ("nodeSelector", "tolerations", "affinity")]).lower()

    @property
    def code_in_config_map(self) -> bool:
        """Whether pods read the packed code from a ConfigMap, because the storage is not one that we can write."""
        return not is_url(str(self.storage))

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that Kubernetes cannot run, as far as can be known before submission."""
        super().check(job)
        if job.array_size and self.kind != "job":
            raise ValueError(f"launch.kind={self.kind}: arrays are Indexed Jobs; try launch.kind=job")
        self.check_set("image", "give the image of the nodes, launch.image=<registry>/<image>:<tag>")
        places = [f"{path.rstrip('/')}/" for path in self.volumes.values()]
        if self.code_in_config_map and not f"{self.storage}/".startswith(tuple(places)):
            raise ValueError(
                f"launch.storage={self.storage} is on no volume of the pods; mount one there with "
                f"launch.volumes.<claim>={self.storage}, or use a URL such as s3://<bucket>/runs"
            )

    def command(self, job: Job) -> list[str]:
        """Return the command that each pod runs."""
        bundle = [f"--bundle={CODE}/{PACKED}"] if self.code_in_config_map else []
        return super().command(job) + bundle

    def render(self, job: Job) -> str:
        """Render the manifests as one YAML file."""
        name = object_name(job)
        space = f" -n {shlex.quote(self.namespace)}" if self.namespace else ""
        steps = [f"kubectl{space} apply -f {self.job_file}"]
        if self.code_in_config_map:
            steps.insert(0, f"kubectl{space} create configmap {name} --from-file={PACKED}")
        group, version, _, kind = API[self.kind]
        metadata: Manifest = {"name": name} | ({"namespace": self.namespace} if self.namespace else {})
        metadata["labels"] = self._labels(job)
        found = [{"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": self._spec(job)}]
        if self.kind == "job" and job.nodes > 1:
            # A restarted pod is found before it is ready, as it becomes ready only when all have found each other.
            service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}}
            found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
        return "---\n".join([to_yaml(found[0], *steps), *map(to_yaml, found[1:])])

    def _labels(self, job: Job) -> dict[str, str]:
        """The labels of the objects and pods of a job."""
        return {"app.kubernetes.io/name": "boltcutter", INSTANCE: object_name(job)} | self.tags

    def _spec(self, job: Job) -> Manifest:
        cpus = self.cpus or job.devices * (1 + job.num_workers)
        # CPUs are requested but not limited, since a limit slows processes down; the rest is both.
        limits: Manifest = dict(self.resources)
        limits |= {"memory": self.memory} if self.memory else {}
        limits |= {self.gpu_resource: job.devices} if job.gpus else {}
        values = {
            "own": self,
            "job": job,
            "name": object_name(job),
            "labels": self._labels(job),
            "command": [_literal(text) for text in self.command(job)],
            "env": self._environment(job),
            "resources": {"requests": {"cpu": f"{cpus:g}"} | limits} | ({"limits": limits} if limits else {}),
            "rdma": any(re.search(r"rdma|efa|hca|infiniband", name) for name in self.resources),
            "volumes": self._volumes(job),
            "seconds": seconds,
        }
        pod = self._pod(**values)
        return dict(render_yaml(Path(__file__).with_name("kubernetes_spec.yaml.j2"), pod=pod, **values))

    def _pod(self, **values: Any) -> Manifest:
        pod: Manifest = render_yaml(Path(__file__).with_name("kubernetes_pod.yaml.j2"), **values)
        return pod | {"spec": pod["spec"] | self.pod}

    def _environment(self, job: Job) -> list[Manifest]:
        """The variables of a container: of the run, of secrets of the namespace, and of the ranks of a job."""
        values: dict[str, object] = {**self.variables(job)}
        if self.user is not None:  # of an image that may not have this user
            values = {"HOME": "/tmp", "USER": "boltcutter"} | values  # noqa: S108
        own = {name: place.split("/") for name, place in self.secrets.items() if not find_reader(place)}
        found: list[Manifest] = [{"name": name, "value": _literal(str(value))} for name, value in values.items()]
        found += [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}} for name, (of, key) in own.items()
        ]
        if self.kind != "job" or job.nodes == 1:
            return found
        name = object_name(job)
        ranks = {"WORLD_SIZE": job.nodes, "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": PORT}
        found.append({"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
        return found + [{"name": name, "value": str(value)} for name, value in ranks.items()]

    def _volumes(self, job: Job) -> list[tuple[str, str, Manifest]]:
        """The volumes of a pod: the name of each, where it is mounted, and what it is."""
        shared: Manifest = {"medium": "Memory"} | ({"sizeLimit": self.shm_size} if self.shm_size else {})
        found: list[tuple[str, str, Manifest]] = [("shm", "/dev/shm", {"emptyDir": shared})]  # noqa: S108
        if self.code_in_config_map:
            found.append(("code", CODE, {"configMap": {"name": object_name(job)}}))
        for number, (place, path) in enumerate(self.volumes.items()):
            is_claim = not place.startswith("/")
            source = {"persistentVolumeClaim": {"claimName": place}} if is_claim else {"hostPath": {"path": place}}
            found.append((f"volume-{number}", path, source))
        return found

    def check_credentials(self) -> None:
        """Raise ValueError if no cluster is configured, or the kubeconfig file does not have the context."""
        self._cluster()

    def array_id(self, job_id: str, index: int) -> str:
        """Return the id of a run of an array from that of the array."""
        return job_id.replace("@", f":{index}@", 1)

    def is_inseparable(self, job_id: str) -> bool:
        """Whether the job is one of an array that can be cancelled only as a whole."""
        return self.split_id(job_id)[2] is not None

    def _cluster(self, job_id: str | None = None) -> tuple[Cluster, str]:
        """The cluster, and the name of the job if there is one."""
        namespace, name, _, context = self.split_id(job_id) if job_id else (self.namespace, "", None, self.context)
        return self._connect(self.kind, context or None, namespace), name

    def create(self, job: Job, file: Path) -> str:
        """Create the objects; those besides the job belong to it, so that Kubernetes deletes them with it."""
        main, *parts = yaml.safe_load_all(file.read_text())
        if self.code_in_config_map:
            parts.append(self._config_map(main["metadata"], job.folder))
        place, _ = self._cluster()
        created = place.create(main)
        owner = {name: main[name] for name in ("apiVersion", "kind")}
        owner |= {name: created["metadata"][name] for name in ("name", "uid")}
        try:
            for part in parts:
                place.create_part(part | {"metadata": part["metadata"] | {"ownerReferences": [owner]}})
        except ValueError:
            place.delete(owner["name"])  # a job is submitted as a whole or not at all
            raise
        return f"{place.namespace}/{owner['name']}@{place.context}"

    def _config_map(self, metadata: dict[str, Any], folder: Path) -> Manifest:
        content = lzma.compress(gzip.decompress((folder / run_files.BUNDLE).read_bytes()))  # smaller by a quarter
        (folder / PACKED).write_bytes(content)
        if len(content) > MAX_CONFIG_MAP:
            raise ValueError(
                f"launch.storage={self.storage}: the packed code has {len(content) / 1e6:.1f} MB, but Kubernetes "
                "stores at most 1 MB with a job; have git ignore large files, or use storage such as s3://<bucket>/runs"
            )
        data = {PACKED: b64encode(content).decode()}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}

    def status(self, job_id: str) -> Status:
        """Return the status of the job, with what is wrong with its pods."""
        place, name = self._cluster(job_id)
        if not (found := place.read(name)):
            return Status("ended", f"job {job_id}, deleted")
        index = self.split_id(job_id)[2]
        pods = [pod for pod in place.pods(name) if index is None or has_index(pod, index)]
        state, text = summarize(found, pods, index)
        faults = [fault for pod in pods if (fault := describe(pod))]
        succeeded = state == "ended" and not text.startswith("failed")
        return Status(state, one_line("; ".join([f"job {job_id}, {text}", *faults])), succeeded)

    def cancel(self, job_id: str) -> None:
        """Delete the job: its pods get SIGTERM, on which the run saves. What the run has written stays."""
        place, name = self._cluster(job_id)
        place.delete(name)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of the first pod, and of those that replace it; without pods that in the storage."""
        shown: dict[tuple[str, int], str | None] = {}
        stored = self.stored_output(folder) if is_url(str(self.storage)) else None

        def new() -> Iterator[str]:
            place, name = self._cluster(job_id)
            index = self.split_id(job_id)[2] or "0"
            for pod in place.pods(name):
                if not has_index(pod, index):
                    continue
                yield from place.new_output(pod, shown, follow=follow)

        yield from self.follow(new, job_id if follow else None)
        if stored and not shown:
            yield from stored()
        elif not shown:
            place = f"{self.remote_folder(folder)}/{LOG}, on a volume of the pods"
            print(f"note: the output of rank 0 is in {place}; copy it from there", file=sys.stderr)


def object_name(job: Job) -> str:
    """Return the name of the objects of a job, which is also a host name: it starts with a letter."""
    name = next_name(job, limit=MAX_NAME - 7)  # with space for what may come before and after it
    return name if name[0].isalpha() else f"run-{name}"


def _literal(text: str) -> str:
    """Escape what Kubernetes would take for a reference to a variable."""
    return text.replace("$", "$$")
