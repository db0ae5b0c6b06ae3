"""Manifests of Kubernetes, checked strictly against the schemas of Kubernetes and of the operators."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import require

from boltcutter.environment.cluster_variables import export_torchrun_env
from boltcutter.environment.platform_facts import PLATFORM, launched_layout
from boltcutter.launch.job import Job
from boltcutter.launch.kubernetes import KubernetesLauncher, object_name

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="kubernetes-validate")
import kubernetes_validate  # noqa: E402

GOLDEN = Path(__file__).parent / "jobs"
VERSIONS = ("1.31", "1.37")  # the oldest with podFailurePolicy as a stable feature, and the newest known
KINDS = ("job", "trainjob")
FOLDER = Path("/p/runs/digits convnet/20261122-101500-0a1b2c3d")
JOB = Job("digits convnet", FOLDER, Path("/p/scripts/train.py"), nodes=2, devices=8, gpus=True, num_workers=4)
SMALL = replace(JOB, nodes=1, devices=1, gpus=False, digests=("0" * 32,))
URL: dict[str, Any] = {"image": "registry.example/team/digits:1", "storage": "s3://bucket/runs"}
ALL: dict[str, Any] = {
    "image": URL["image"],
    "storage": "/mnt/runs/vision",
    "environment": {"NCCL_DEBUG": "WARN"},
    "max_restarts": 3,
    "namespace": "vision",
    "memory": "512Gi",
    "resources": {"rdma/hca": 1},
    "shm_size": "64Gi",
    "pod": {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"gpu": "h200", "spot": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "volumes": {"runs": "/mnt/runs", "/data": "/data"},
    "secrets": {"WANDB_API_KEY": "wandb/WANDB_API_KEY", "HF_TOKEN": "hub/token"},
    "tags": {"kueue.x-k8s.io/queue-name": "gpus"},
    "grace": 300,
    "time": "2-00:00:00",
}


def documents(kind: str, settings: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KubernetesLauncher(kind=kind, **settings).render(job)))


def check(found: dict[str, Any]) -> None:
    """Check a document; unknown fields are errors."""
    if found["kind"] == "TrainJob":
        from kubeflow_trainer_api import models

        model = models.TrainerV1alpha1TrainJob
        assert model.from_dict(found).to_dict() == found  # the models check types and drop unknown fields
    else:
        check_core(found.pop("apiVersion"), found.pop("kind"), **found)


def check_core(version: str, kind: str, **fields: Any) -> None:
    for release in VERSIONS:
        kubernetes_validate.validate({"apiVersion": version, "kind": kind, **fields}, release, strict=True)


@pytest.mark.parametrize("settings", [URL, ALL], ids=["url", "all"])
@pytest.mark.parametrize("job", [JOB, SMALL], ids=["two-nodes", "one-process"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_valid(kind: str, job: Job, settings: dict[str, Any]) -> None:
    for found in documents(kind, settings, job):
        check(found)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all mappings whose keys Kubernetes defines."""
    free = ("annotations", "labels", "nodeSelector", "limits", "requests")
    if isinstance(value, dict) and (not path or path[-1] not in free):
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(part, dict | list) and key not in free:
            yield from leaves(part, (*path, key))


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_refuses_an_unknown_field_anywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "VERSIONS", VERSIONS[-1:])
    for valid in documents(kind, ALL, JOB):
        for path in leaves(valid):
            found = deepcopy(valid)
            place = found
            for key in path:
                place = place[key]
            place["unknown"] = 1
            with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
                check(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("suffix", "settings", "job"), [("", ALL, JOB), ("_small", URL, SMALL)])
def test_manifests_are_as_reviewed(kind: str, suffix: str, settings: dict[str, Any], job: Job) -> None:
    file = GOLDEN / f"kubernetes_{kind}{suffix}.yaml"
    assert KubernetesLauncher(kind=kind, **settings).render(job) == file.read_text()


def test_an_array_is_an_indexed_job_with_a_run_for_each_index() -> None:
    """https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index."""
    array = replace(SMALL, array_size=3)
    (found,) = documents("job", URL | {"array": "seed=1,2,3", "max_parallel": 2}, array)
    spec, index = found["spec"], JOB.folder.name
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (3, 2, 10)
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore", "FailIndex"]
    (container,) = spec["template"]["spec"]["containers"]
    home = f"s3://bucket/runs/digits convnet/{index}"
    options = [
        "--index=JOB_COMPLETION_INDEX",
        f"--bundle={home}/job.tar.gz",
        "trust=sha256:00000000000000000000000000000000",
    ]
    assert container["command"][3:] == [f"{home}/{index}-", *options]
    check(found)


def test_arrays_of_several_nodes_or_of_operators_are_refused(tmp_path: Path) -> None:
    for kind, nodes, fault in (("job", 2, "trainer.num_nodes=2"), ("trainjob", 1, "launch.kind=trainjob")):
        array = replace(SMALL, array_size=2, nodes=nodes, root=tmp_path, code=tmp_path, folder=tmp_path / "runs" / "a")
        with pytest.raises(ValueError, match=f"^{fault}: .*; try launch"):
            KubernetesLauncher(kind=kind, **URL).check(array)


@pytest.mark.parametrize("name", ["x" * 100, "2nd try", "-_ü", "a.b/c"])
def test_names_are_host_names(name: str) -> None:
    found = object_name(replace(JOB, name=name))
    assert found[0].isalpha()
    assert len(found) <= 48
    assert found.endswith("20261122-101500-0a1b2c3d")
    assert found.replace("-", "").isalnum()
    assert found == found.lower()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_the_time_to_save_and_no_privileges(kind: str) -> None:
    text = KubernetesLauncher(kind=kind, **ALL).render(JOB)
    assert text.count("terminationGracePeriodSeconds: 300") == text.count("runAsNonRoot: true") > 0
    assert "privileged" not in text


def test_values_are_not_expanded() -> None:
    settings = URL | {"environment": {"A": "$(HOME) $$x"}, "storage": "s3://b/$(USER)"}
    (found,) = documents("job", settings, SMALL)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert {"name": "A", "value": "$$(HOME) $$$$x"} in container["env"]
    assert container["command"][3].startswith("s3://b/$$(USER)/")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("resources", "expected"), [({"rdma/hca": 1}, True), ({"vpc.amazonaws.com/efa": 4}, True), ({}, False)]
)
def test_pods_with_rdma_may_lock_memory(kind: str, resources: dict[str, Any], expected: bool) -> None:
    """https://docs.nvidia.com/networking/display/kubernetes2501/quick-start: pods of RDMA add this capability."""
    text = KubernetesLauncher(kind=kind, **URL, resources=resources).render(JOB)
    assert ("- IPC_LOCK" in text) is expected


@pytest.mark.parametrize("kind", KINDS)
def test_autoscalers_do_not_evict_pods(kind: str) -> None:
    """https://karpenter.sh/docs/concepts/disruption/#pod-level-controls; both are annotations of pods."""
    text = KubernetesLauncher(kind=kind, **URL).render(JOB)
    assert "karpenter.sh/do-not-disrupt: 'true'" in text
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict: 'false'" in text
    assert "karpenter" not in KubernetesLauncher(kind=kind, **URL, annotations={}).render(JOB)


def operator_variables(kind: str, spec: dict[str, Any]) -> dict[str, str]:
    """Variables of the second pod that the controller or operator sets.

    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/,
    https://www.kubeflow.org/docs/components/trainer/operator-guides/ml-policy/
    """
    if kind == "job":
        return {"JOB_COMPLETION_INDEX": "1"}
    name = object_name(JOB)
    found = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": str(spec["trainer"]["numProcPerNode"]), "PET_NODE_RANK": "1"}
    return found | {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_pod_knows_its_rank(kind: str) -> None:
    found = documents(kind, ALL, JOB)[0]
    spec = found["spec"]
    if kind == "trainjob":
        container = spec["trainer"]
    else:
        (container,) = spec["template"]["spec"]["containers"]
    references = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": "1"}
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"} | operator_variables(kind, spec)
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" not in source:
            env[variable["name"]] = variable.get("value") or references[source["fieldRef"]["fieldPath"]]
    export_torchrun_env(env)
    name = object_name(JOB)
    first = {"job": f"{name}-0.{name}", "trainjob": f"{name}-node-0-0.{name}"}
    assert env["MASTER_ADDR"] == first[kind]
    assert (env["NODE_RANK"], env["BOLTCUTTER_NODES"]) == ("1", "2")
    assert launched_layout(env) in ((env[PLATFORM], 2, 8), (env[PLATFORM], 2, None))
    assert not env.keys() & {"RANK", "WORLD_SIZE"}
