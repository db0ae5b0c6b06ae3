"""What is said about jobs, pods and errors of the API server."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch import kubernetes_cluster
from boltcutter.launch.job import NoAnswerError, UnreachableError
from boltcutter.launch.kubernetes_cluster import Cluster, describe, has_index, summarize

from .kubernetes_api import TOKEN, ApiServer, api_server, pod, status, write_kubeconfig

OTHER = "arn:aws:eks:eu-west-1:1:cluster/other"
BODY = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with api_server(tmp_path) as (found, file):
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield found


def test_the_context_selects_cluster_and_namespace(server: ApiServer) -> None:
    assert (Cluster("job", None, None).context, Cluster("job", None, None).namespace) == ("lab", "vision")
    assert (Cluster("job", OTHER, None).context, Cluster("job", OTHER, None).namespace) == (OTHER, "default")
    assert Cluster("job", None, "mine").namespace == "mine"
    with pytest.raises(ValueError, match=f"launch.context=x is not in the kubeconfig file; choose from lab, {OTHER}"):
        Cluster("job", "x", None)


@pytest.mark.parametrize("content", [None, "", "{}", "contexts: 7", "a: [", "{apiVersion: v1, current-context: gone}"])
def test_without_a_cluster_the_command_to_log_in_is_given(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    if content is not None:
        (tmp_path / "kubeconfig").write_text(content)
    with pytest.raises(ValueError, match=r"no cluster is configured .*; log in, for example with aws eks") as error:
        Cluster("job", None, None)
    assert "\n" not in str(error.value)


def test_the_client_is_imported_only_then(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; import boltcutter.launch.kubernetes; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ValueError, match=r"kubernetes is not installed; pip install "):
        Cluster("job", None, None)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("job", "/apis/batch/v1/namespaces/vision/jobs"),
        ("trainjob", "/apis/trainer.kubeflow.org/v1alpha1/namespaces/vision/trainjobs"),
    ],
)
def test_each_request_has_the_fields_of_the_api(kind: str, path: str, server: ApiServer) -> None:
    found = Cluster(kind, None, None)
    assert found.create(BODY)["metadata"]["uid"]
    with pytest.raises(ValueError, match="already exists; delete it, or launch the run in another folder"):
        found.create(BODY)
    found.create_part({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"clusterIP": "None"}})
    found.create_part({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "binaryData": {"b": "eA=="}})
    assert found.read("a")["kind"] == "Job"
    assert found.read("b") is None
    found.delete("a")
    found.delete("b")
    server.pods = [pod("a-0", "Running")]
    server.logs = {"a-0": [b"one \xc3", b"\xa9 \xff\n", b"two\n"]}
    assert [one["metadata"]["name"] for one in found.pods("a")] == ["a-0"]
    assert [line.partition(" ")[2] for line in found.log("a-0", follow=True)] == ["one é \ufffd\n", "two\n"]
    assert list(found.log("b-0", follow=False)) == []
    core = "/api/v1/namespaces/vision"
    strict, foreground = {"fieldValidation": "Strict"}, {"propagationPolicy": "Foreground"}
    sent = [(request.method, request.path, request.query) for request in server.requests]
    for _, _, query in sent[-2:]:
        query |= {name: value.lower() for name, value in query.items()}  # older clients write True
    assert sent == [
        ("POST", path, strict),
        ("POST", path, strict),
        ("POST", f"{core}/services", strict),
        ("POST", f"{core}/configmaps", strict),
        ("GET", f"{path}/a", {}),
        ("GET", f"{path}/b", {}),
        ("DELETE", f"{path}/a", foreground),
        ("DELETE", f"{path}/b", foreground),
        ("GET", f"{core}/pods", {"labelSelector": "app.kubernetes.io/instance=a"}),
        ("GET", f"{core}/pods/a-0/log", {"follow": "true", "timestamps": "true"}),
        ("GET", f"{core}/pods/b-0/log", {"follow": "false", "timestamps": "true"}),
    ]
    assert {request.token for request in server.requests} == {f"Bearer {TOKEN}"}
    bodies = [request.body for request in server.sent("POST")]
    assert bodies[:2] == [BODY, BODY]
    assert bodies[2]["spec"] == {"clusterIP": "None"}
    assert bodies[3]["binaryData"] == {"b": "eA=="}


@pytest.mark.parametrize(
    ("code", "answer", "message"),
    [
        (401, status(401, "Unauthorized", "Unauthorized"), "401 Unauthorized; log in again"),
        (
            403,
            status(403, "Forbidden", 'jobs.batch is forbidden: User "me" cannot create'),
            '403 jobs.batch is forbidden: User "me" cannot create; ask for the role, or choose another '
            "launch.namespace",
        ),
        (
            404,
            status(404, "NotFound", 'namespaces "vision" not found', name="vision", kind="namespaces"),
            '404 namespaces "vision" not found; correct launch.namespace',
        ),
        (404, "404 page not found\n", "404 Not Found; correct launch.namespace, or install the operator"),
        (
            422,
            status(422, "Invalid", 'Job "a" is invalid: spec.template:\n Invalid value', kind="Job"),
            '422 Job "a" is invalid: spec.template: Invalid value',
        ),
        (400, status(400, "BadRequest", 'strict decoding error: unknown field "spec.x"'), 'unknown field "spec.x"'),
        (500, "<html>\noops</html>", "500 Internal Server Error"),
    ],
)
def test_errors_are_one_line(code: int, answer: Any, message: str, server: ApiServer) -> None:
    server.failures["POST", "/jobs"] = (code, answer)
    with pytest.raises(ValueError, match="launch=kubernetes: ") as error:
        Cluster("job", None, None).create(BODY)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gateway_that_gave_up_waiting_may_have_created_the_job(server: ApiServer) -> None:
    server.failures["POST", "/jobs"] = (504, status(504, "Timeout", "request did not complete in 60s"))
    with pytest.raises(NoAnswerError, match="the API server of lab does not respond"):
        Cluster("job", None, None).create(BODY)


def test_a_server_that_does_not_respond_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_cluster, "TIMEOUT", (1, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and sends nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", url)))
        found = Cluster("job", None, None)
        start = time.monotonic()
        with pytest.raises(UnreachableError, match="the API server of lab does not respond"):
            found.read("a")
        with pytest.raises(NoAnswerError, match="the API server of lab does not respond"):
            found.create(BODY)
    with pytest.raises(UnreachableError, match="check the network or the VPN") as error:
        found.create(BODY)
    assert not isinstance(error.value, NoAnswerError)  # refused, so nothing was created
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 10


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, None),
        (waiting("ContainerCreating"), None),
        ({"containerStatuses": [{"state": {"running": {"startedAt": "x"}}}]}, None),
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}, None),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "x"'),
            'ImagePullBackOff: Back-off pulling image "x"',
        ),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ]
            },
            "Unschedulable: 0/3 nodes",
        ),
        (
            {"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
            "OOMKilled: exit status 137",
        ),
        (
            {"reason": "Evicted", "message": "The node was low on resource: memory."},
            "Evicted: The node was low on resource: memory.",
        ),
        (waiting("NewReason"), "NewReason"),
        (
            {"initContainerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "CrashLoopBackOff",
        ),
    ],
)
def test_what_is_wrong_with_a_pod_is_said(fields: dict[str, Any], text: str | None) -> None:
    assert describe(pod("a-0", "Pending", **fields)) == (text and f"pod a-0: {text}")


@pytest.mark.parametrize(
    ("conditions", "pods", "expected"),
    [
        ([], [], ("pending", "pending")),
        (None, [pod("a", "Pending")], ("pending", "pending")),
        ([], [pod("a", "Running"), pod("b", "Pending")], ("running", "running, 1 pods")),
        ([{"type": "Suspended", "status": "True"}], [], ("pending", "suspended")),
        ([{"type": "Complete", "status": "True"}], [], ("ended", "complete")),
        ([{"type": "Succeeded", "status": "True"}], [pod("a", "Running")], ("ended", "succeeded")),
        ([{"type": "Failed", "status": "False"}], [], ("pending", "pending")),
        (
            [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "Job has reached"}],
            [],
            ("ended", "failed (BackoffLimitExceeded: Job has reached)"),
        ),
    ],
)
def test_the_state_follows_from_conditions_and_pods(
    conditions: list[Any] | None, pods: list[Any], expected: tuple[str, str]
) -> None:
    job = {"metadata": {}} | ({} if conditions is None else {"status": {"conditions": conditions}})
    assert summarize(job, pods) == expected


def test_a_deleted_job_runs_until_it_has_saved() -> None:
    job = {"metadata": {"deletionTimestamp": "x"}}
    assert summarize(job, [pod("a", "Running")]) == ("running", "being deleted, 1 pods are saving")


def test_the_pod_of_an_index_is_known() -> None:
    assert [has_index(one, "0") for one in (pod("a", "Running"), pod("b", "Running", index=1))] == [True, False]


def test_the_state_of_an_index_of_an_array() -> None:
    """https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/#JobStatus: 1,3-5."""
    job: dict[str, Any] = {"metadata": {}, "status": {"completedIndexes": "1,3-5", "failedIndexes": "2"}}
    found = {index: summarize(job, [], str(index)) for index in range(7)}
    assert {index for index, state in found.items() if state == ("ended", "complete")} == {1, 3, 4, 5}
    assert found[2] == ("ended", "failed")
    assert found[0] == found[6] == ("pending", "pending")
    assert summarize(job, [pod("a", "Running", index=6)], "6") == ("running", "running, 1 pods")
