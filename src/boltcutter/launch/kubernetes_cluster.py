"""The API server of a Kubernetes cluster, called by the official client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import yaml

from boltcutter.config.errors import one_line
from boltcutter.launch.job import NoAnswerError, State, UnreachableError
from boltcutter.project import install_command

INSTANCE = "app.kubernetes.io/instance"  # label of all objects and pods of a job
API = {  # group, version, plural and kind
    "job": ("batch", "v1", "jobs", "Job"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
}
TIMEOUT = (5, 30)  # seconds to connect, and to wait for an answer
GATEWAY_TIMEOUT = 504  # the request may have had an effect
LOG_TIMEOUT = (5, 24 * 3600)  # a training may be silent for long
ENDED = {"Complete", "Completed", "Succeeded", "Failed"}  # conditions of the kinds of jobs
STARTING = {"ContainerCreating", "PodInitializing"}
REMEDIES = {
    401: "log in again",
    403: "ask for the role, or choose another launch.namespace",
    404: "correct launch.namespace, or install the operator of launch.kind",
    409: "delete it, or launch the run in another folder",
}

Manifest = dict[str, Any]


class Cluster:
    """A cluster, as the kubeconfig file describes it.

    Args:
        kind: Kind of the jobs.
        context: Context of the kubeconfig file; None: the current one.
        namespace: Namespace; None: that of the context.

    Raises:
        ValueError: There is no kubeconfig file, or it does not have the context.
    """

    def __init__(self, kind: str, context: str | None, namespace: str | None) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise ValueError(
                f"launch=kubernetes: kubernetes is not installed; {install_command('kubernetes')}"
            ) from None
        group, version, plural, _ = API[kind]
        settings, file = client.Configuration(), os.environ.get("KUBECONFIG")
        try:
            known, current = config.list_kube_config_contexts(file)
            found = current if not context else next((one for one in known if one["name"] == context), None)
            if not found:
                names = ", ".join(one["name"] for one in known)
                raise ValueError(f"launch.context={context} is not in the kubeconfig file; choose from {names}")
            self.context, default = found["name"], found["context"].get("namespace", "default")
            config.load_kube_config(file, self.context, settings)
        except (config.ConfigException, OSError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(
                f"launch=kubernetes: no cluster is configured ({one_line(error)}); log in, for example with aws eks "
                "update-kubeconfig, gcloud container clusters get-credentials or az aks get-credentials"
            ) from error
        self.namespace = namespace or default
        settings.retries = False
        self._client, self._error = client.ApiClient(settings), client.ApiException
        self._core, self._jobs = client.CoreV1Api(self._client), client.CustomObjectsApi(self._client)
        self._place = group, version, self.namespace, plural

    def create(self, body: Manifest) -> Manifest:
        """Create a job and return it."""
        create = self._jobs.create_namespaced_custom_object
        created: Manifest = self._call(create, *self._place, body, field_validation="Strict")
        return created

    def create_part(self, body: Manifest) -> None:
        """Create a Service or a ConfigMap."""
        suffix = {"Service": "service", "ConfigMap": "config_map"}[body["kind"]]
        create = getattr(self._core, f"create_namespaced_{suffix}")
        self._call(create, self.namespace, body, field_validation="Strict", _preload_content=False)

    def read(self, name: str) -> Manifest | None:
        """Return a job; None if there is none of this name."""
        found: Manifest | None = self._call(self._jobs.get_namespaced_custom_object, *self._place, name, none_if=404)
        return found

    def delete(self, name: str) -> None:
        """Delete a job, if it exists, and its pods, which get SIGTERM."""
        delete = self._jobs.delete_namespaced_custom_object
        self._call(delete, *self._place, name, propagation_policy="Foreground", none_if=404)

    def pods(self, name: str) -> list[Manifest]:
        """Return the pods of a job, the oldest first."""
        answer = self._call(
            self._core.list_namespaced_pod, self.namespace, label_selector=f"{INSTANCE}={name}", _preload_content=False
        )
        found: list[Manifest] = json.loads(answer.data)["items"]
        return sorted(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a pod's output with their times; with ``follow`` until it ends or is disconnected."""
        from urllib3.exceptions import HTTPError

        options: dict[str, Any] = {"follow": follow, "timestamps": True, "timeout": LOG_TIMEOUT}
        if not (
            answer := self._call(
                self._core.read_namespaced_pod_log, pod, self.namespace, none_if=404, _preload_content=False, **options
            )
        ):
            return  # deleted since it was listed
        line = b""
        with suppress(HTTPError):  # a connection that is closed while the pod runs: more is read later
            for content in answer.stream(65536):
                *lines, line = (line + content).split(b"\n")
                yield from (f"{one.decode(errors='replace')}\n" for one in lines)
        if line:
            yield line.decode(errors="replace")

    def new_output(self, pod: Manifest, shown: dict[tuple[str, int], str | None], *, follow: bool) -> Iterator[str]:
        """Yield the output of a pod that was not shown before.

        Args:
            pod: The pod.
            shown: Time of the last line that was shown, by pod and restart; None: all. Updated. A log is not the
                same at each call: nodes start a new file after 10 MB.
            follow: Whether to yield what is written until the pod ends.
        """
        status = pod["status"]
        start = pod["metadata"]["uid"], sum(one.get("restartCount", 0) for one in status.get("containerStatuses", ()))
        if status["phase"] == "Pending" or (last := shown.setdefault(start, "")) is None:
            return
        for line in self.log(pod["metadata"]["name"], follow=follow):
            at, _, text = line.partition(" ")
            if at > last:  # they have nine digits after the point
                shown[start] = at
                yield text
        if status["phase"] != "Running":
            shown[start] = None

    def _call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        none_if: int = 0,
        timeout: tuple[int, int] | None = None,
        **options: Any,
    ) -> Any:
        """Call the API server; its errors become a ValueError of one line, and the status ``none_if`` None."""
        from urllib3.exceptions import HTTPError, NewConnectionError

        try:
            return function(*arguments, _request_timeout=timeout or TIMEOUT, **options)
        except (self._error, HTTPError) as error:
            status = getattr(error, "status", GATEWAY_TIMEOUT)
            if status == none_if:
                return None
            if status != GATEWAY_TIMEOUT:
                raise ValueError(f"launch=kubernetes: {self._explain(error)}") from error
            fault = f"launch=kubernetes: the API server of {self.context} does not respond"
            if "field_validation" in options and not isinstance(error, NewConnectionError):
                raise NoAnswerError(fault) from error
            raise UnreachableError(f"{fault} ({one_line(error)}); check the network or the VPN") from error

    def _explain(self, error: Any) -> str:
        """Describe an error of the API server, with its remedy."""
        try:
            message = json.loads(error.body)["message"]
        except (KeyError, TypeError, ValueError):
            message = error.reason
        remedy = REMEDIES.get(error.status, "correct the setting that the message names")
        return f"{error.status} {one_line(message)}; {remedy}"


def summarize(job: Manifest, pods: list[Manifest], index: str | None = None) -> tuple[State, str]:
    """Return the state of a job, or of one index of it whose pods are given, and its description."""
    for name in ("completed", "failed") if index is not None else ():
        # Such as 1,3-5: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/#JobStatus
        for part in filter(None, job.get("status", {}).get(f"{name}Indexes", "").split(",")):
            first, _, last = part.partition("-")
            if int(first) <= int(str(index)) <= int(last or first):
                return "ended", {"completed": "complete"}.get(name, name)
    conditions = {one["type"]: one for one in job.get("status", {}).get("conditions", ()) if one["status"] == "True"}
    if ended := next((conditions[name] for name in conditions if name in ENDED), None):
        reason = f" ({ended.get('reason', '')}: {ended.get('message', '')})" if ended["type"] == "Failed" else ""
        return "ended", ended["type"].lower() + reason
    running = sum(pod["status"].get("phase") == "Running" for pod in pods)
    if "deletionTimestamp" in job["metadata"]:
        return "running", f"being deleted, {running} pods are saving"
    if running:
        return "running", f"running, {running} pods"
    return "pending", "suspended" if "Suspended" in conditions else "pending"


def describe(pod: Manifest) -> str | None:
    """Describe what is wrong with a pod; None if nothing is."""
    name, status = pod["metadata"]["name"], pod["status"]
    faults = [one for one in status.get("conditions", ()) if one["type"] == "PodScheduled" and one["status"] == "False"]
    if status.get("reason"):  # evicted
        faults.append(status)
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        state = container.get("state", {})
        waiting, ended = state.get("waiting", {}), state.get("terminated", {})
        if waiting.get("reason", "ContainerCreating") not in STARTING:
            faults.append(waiting)
        if ended.get("exitCode"):
            faults.append({"message": f"exit status {ended['exitCode']}"} | ended)
    if not faults:
        return None
    return f"pod {name}: " + ": ".join(filter(None, (faults[-1].get("reason"), faults[-1].get("message"))))


def has_index(pod: Manifest, index: str) -> bool:
    """Whether a pod has this index in its job: that of its rank, or of its run in an array."""
    annotations = pod["metadata"].get("annotations", {})
    return bool(annotations.get("batch.kubernetes.io/job-completion-index", "0") == index)
