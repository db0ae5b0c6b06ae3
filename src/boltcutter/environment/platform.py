"""Nodes that a cloud's platform has started, told to the rest in the words that it knows.

Each platform says in variables of its own which node this is, how many there are, and where the first one is. Lightning
starts a process for each device from there. Where the platform has started one for each device itself, each has all
that torchrun would tell it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter.environment.process import in_slurm_step

PLATFORM = "BOLTCUTTER_PLATFORM"  # its name; set once its variables have been read, and inherited
NODES = "BOLTCUTTER_NODES"  # how many it has started; trainer.num_nodes takes it from here
DEVICES = "BOLTCUTTER_DEVICES"  # processes that it reckons with on each of them, where it says so
JOB = "BOLTCUTTER_JOB"  # what it calls the job, also when it starts it again
PORTS = range(20_000, 32_000)  # below those that systems give out by themselves
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
KNOWN = {"TORCHELASTIC_RUN_ID", "JSM_NAMESPACE_RANK", "HOROVOD_RANK"}  # of processes whose launcher told them all
POOLS = ("workerpool0", "chief", "master", "workerpool1", "worker")  # those that train, the first one first

Env = Mapping[str, str]


class PlatformError(ValueError):
    """The variables do not say which process this is."""


@dataclass(frozen=True)
class Node:
    """What a platform says of this node.

    Args:
        platform: Its name.
        node: Number of this node.
        nodes: How many there are.
        address: Of the first node.
        port: There.
        devices: Processes on each node.
        job: Name that no other job has, and that this one keeps when it is started again.
    """

    platform: str
    node: int = 0
    nodes: int = 1
    address: str | None = None
    port: str | None = None
    devices: int | None = None
    job: str | None = None


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Where a platform has started this process, set what Lightning, or torchrun's processes, would look for.

    Args:
        env: Changed.

    Raises:
        PlatformError: What is set does not go together.
    """
    if PLATFORM in env or (place := detect(env)) is None:
        return
    env[PLATFORM] = place.platform
    if place.job:
        env[JOB] = re.sub(r"[^\w.-]", "-", f"{place.platform}-{place.job}")
    if env.keys() & KNOWN or in_slurm_step(env):
        return
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        if place.platform != "azureml" or env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != "1":
            if place.address:
                env.setdefault("MASTER_ADDR", place.address)
            return  # mpirun's processes, each with its rank
        for name in [name for name in env if name.startswith(("OMPI_", "PMIX_"))]:
            del env[name]  # one process on each node: the rest is started from here, and not by MPI
    if place.nodes > 1 and not (place.address or env.get("MASTER_ADDR")):
        raise PlatformError(
            f"MASTER_ADDR is not set, and {place.platform} does not say where the first of its {place.nodes} nodes is; "
            "set it to that one's address"
        )
    each = _processes(env, place)
    told: dict[str, Any] = {NODES: place.nodes, "NODE_RANK": place.node}
    if "LOCAL_RANK" in env:
        told["LOCAL_WORLD_SIZE"] = each
    elif each:
        told[DEVICES] = each
    if place.nodes > 1 or "LOCAL_RANK" in env:
        port = PORTS[zlib.crc32(place.job.encode()) % len(PORTS)] if place.job else 29500
        told |= {name: value for name, value in _meeting(place, port).items() if not env.get(name)}
    env.update({name: str(value) for name, value in told.items()})


def launched_layout(env: Env = os.environ) -> tuple[str, int, int | None] | None:
    """The platform, its nodes, and the processes on each that it reckons with; None where there is none."""
    if NODES not in env:
        return None
    return env[PLATFORM], int(env[NODES]), int(env[DEVICES]) if DEVICES in env else None


def job_run_id(words: Sequence[str], env: Env = os.environ) -> str | None:
    """A name for what ``words`` train in the platform's job: the same each time that it starts them."""
    return f"{env[JOB]}-{zlib.crc32(' '.join(words).encode()):08x}" if JOB in env else None


def detect(env: Env) -> Node | None:
    """What the platform says, whichever it is.

    Raises:
        PlatformError: It says what cannot be, or there are two that do not agree.
    """
    places = [place for read in READERS if (place := read(env))]
    for place in places:
        if not 0 <= place.node < place.nodes:
            raise PlatformError(
                f"{place.platform}: node {place.node} of {place.nodes} cannot be, as they count from 0; "
                "correct its variables"
            )
    several = [place for place in places if place.nodes > 1]
    for place in several[1:]:
        if (place.node, place.nodes) != (several[0].node, several[0].nodes):
            raise PlatformError(
                f"{several[0].platform} says that this is node {several[0].node} of {several[0].nodes}, "
                f"{place.platform} that it is node {place.node} of {place.nodes}; unset the variables of one of them"
            )
    return next(iter(several or places), None)


def _meeting(place: Node, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": place.address or "127.0.0.1", "MASTER_PORT": place.port or str(port)}


def _processes(env: MutableMapping[str, str], place: Node) -> int | None:
    """See that ranks that are set fit the node; take away those that only count nodes. Gives processes on each node."""
    here = f"node {place.node} of {place.nodes} by what {place.platform} says"
    if "NODE_RANK" in env and _number(env, "NODE_RANK") != place.node:
        raise PlatformError(f"NODE_RANK={env['NODE_RANK']}, but this is {here}; unset NODE_RANK")
    world = _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else None
    each = None if world is None else world // place.nodes
    if world is not None and (world < 1 or world % place.nodes or each not in (1, place.devices or each)):
        of = f" with {place.devices} processes each" if place.devices else ""
        raise PlatformError(f"WORLD_SIZE={world} does not fit {place.nodes} nodes{of}, as {here}; unset WORLD_SIZE")
    if "LOCAL_RANK" in env:
        if "RANK" not in env or each is None:
            raise PlatformError(f"LOCAL_RANK={env['LOCAL_RANK']} is set, RANK and WORLD_SIZE are not; set all or none")
        rank, local = _number(env, "RANK"), _number(env, "LOCAL_RANK")
        if not 0 <= local < each or rank != place.node * each + local:
            raise PlatformError(
                f"RANK={rank}, LOCAL_RANK={local}, WORLD_SIZE={world} do not fit {here}; unset all three, to have a "
                "process for each device started from here"
            )
        if each > 1:
            return each
    elif "RANK" in env and _number(env, "RANK") != place.node:
        raise PlatformError(f"RANK={env['RANK']}, but this is {here}; unset RANK, or set LOCAL_RANK as well")
    for name in RANKS:
        env.pop(name, None)
    return place.devices or (each if each and each > 1 else None)


def _vertex(env: Env) -> Node | None:
    """Google's Vertex AI and AI Platform: ``RANK`` and ``WORLD_SIZE`` count nodes there.

    Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training (``CLUSTER_SPEC``, pools);
    https://cloud.google.com/ai-platform/training/docs/distributed-pytorch (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``);
    https://cloud.google.com/ai-platform/training/docs/distributed-training-details (``TF_CONFIG``).
    """
    name = "CLUSTER_SPEC" if "CLUSTER_SPEC" in env else "TF_CONFIG"
    if name not in env or (name == "TF_CONFIG" and "CLOUD_ML_JOB_ID" not in env):
        return None
    spec = _json(name, env[name], "cluster", "task")
    pools, task = spec["cluster"], spec["task"]
    hosts = [(pool, number, host) for pool in POOLS for number, host in enumerate(pools.get(pool, ()))]
    part, index = str(task.get("type", "")), int(task.get("index", 0))
    node = next((node for node, host in enumerate(hosts) if host[:2] == (part, index)), 0 if not pools else None)
    if node is None:
        raise PlatformError(f"{name}: {part} {index} is none of the machines that train; start something else there")
    address, _, port = hosts[0][2].partition(":") if hosts else ("", "", "")
    ids = [env.get("CLOUD_ML_JOB_ID"), task.get("trial")]
    known = "-".join(str(part) for part in ids if part) if ids[0] else None
    return Node("vertex", node, max(1, len(hosts)), address or None, port or None, job=known)


def _sagemaker(env: Env) -> Node | None:
    """Amazon SageMaker: variables of its toolkit, or the file that each of its containers has.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md;
    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    (``resourceconfig.json``, hosts in the order of the alphabet, ``TRAINING_JOB_NAME``).
    """
    file = Path(env.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/resourceconfig.json")
    if "SM_HOSTS" in env:
        hosts, current = _json("SM_HOSTS", env["SM_HOSTS"]), env.get("SM_CURRENT_HOST")
    elif file.is_file():
        config = _json(str(file), file.read_text(), "hosts", "current_host")
        hosts, current = config["hosts"], config["current_host"]
    else:
        return None
    hosts = sorted(hosts)
    if current not in hosts:
        raise PlatformError(f"SM_CURRENT_HOST={current} is none of SM_HOSTS={json.dumps(hosts)}; correct one of them")
    return Node("sagemaker", hosts.index(current), len(hosts), hosts[0], job=env.get("TRAINING_JOB_NAME"))


def _azureml(env: Env) -> Node | None:
    """Azure Machine Learning, ``distribution: pytorch`` or ``mpi``, one process on each node or one for each device.

    Source: https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (``NODE_RANK``, ``RANK``,
    ``process_count_per_instance``); https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables
    (``AZ_BATCH_MASTER_NODE``, ``AZ_BATCH_HOST_LIST``).
    """
    if "AZUREML_RUN_ID" not in env:
        return None
    hosts = re.findall("[^,;]+", env.get("AZ_BATCH_HOST_LIST") or env.get("AZ_BATCH_NODE_LIST", ""))
    node, nodes = 0, len(hosts)
    if mpi := "OMPI_COMM_WORLD_RANK" in env:
        each = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
        node, nodes = _number(env, "OMPI_COMM_WORLD_RANK") // each, _number(env, "OMPI_COMM_WORLD_SIZE") // each
    elif "NODE_RANK" in env:
        node = _number(env, "NODE_RANK")
    if "AZUREML_NODE_COUNT" in env and not mpi:
        nodes = _number(env, "AZUREML_NODE_COUNT")
    if not nodes and "NODE_RANK" in env:
        return None  # ranks alone tell enough, where there is one for each process
    first = env.get("AZ_BATCH_MASTER_NODE") or env.get("AZ_BATCHAI_MPI_MASTER_NODE", "")
    return Node("azureml", node, nodes or 1, first.partition(":")[0] or None, job=env["AZUREML_RUN_ID"])


def _kubeflow(env: Env) -> Node | None:
    """Kubeflow's PyTorchJob (there ``WORLD_SIZE`` may count nodes or processes) and TrainJob (``PET_…`` alone).

    Source: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/;
    https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/; torchrun reads the same variables,
    https://docs.pytorch.org/docs/stable/elastic/run.html.
    """
    if "PET_NODE_RANK" not in env:
        if "PET_RDZV_ENDPOINT" in env and "TORCHELASTIC_RUN_ID" not in env:
            raise PlatformError("PET_RDZV_ENDPOINT: an elastic job has no ranks of its own; start it with torchrun")
        return None
    each = env.get("PET_NPROC_PER_NODE", "")
    return Node(
        "kubeflow",
        _number(env, "PET_NODE_RANK"),
        _number(env, "PET_NNODES"),
        env.get("PET_MASTER_ADDR"),
        env.get("PET_MASTER_PORT"),
        devices=int(each) if each.isdigit() else None,
    )


def _pods(env: Env) -> Node | None:
    """Other operators of Kubernetes, which know pods alone: Volcano, PyTorchJob before ``PET_…``, Alibaba's PAI.

    Source: https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_pytorch_plugin.md;
    https://www.alibabacloud.com/help/en/pai/general-environment-variables.
    """
    if not {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    if env.keys() & {"LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_NODE_RANK", "CLUSTER_SPEC"}:
        return None
    return Node("kubernetes", _number(env, "RANK"), _number(env, "WORLD_SIZE"), env["MASTER_ADDR"])


def _aws_batch(env: Env) -> Node | None:
    """AWS Batch; of several nodes the main one need not be number 0, and is not told its own address.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html.
    """
    if "AWS_BATCH_JOB_ID" not in env:
        return None
    known = env["AWS_BATCH_JOB_ID"].partition("#")[0]  # what follows is the node
    if "AWS_BATCH_JOB_NUM_NODES" not in env:
        return Node("aws-batch", job=known)
    nodes, index = _number(env, "AWS_BATCH_JOB_NUM_NODES"), _number(env, "AWS_BATCH_JOB_NODE_INDEX")
    node = (index - _number(env, "AWS_BATCH_JOB_MAIN_NODE_INDEX")) % nodes if 0 <= index < nodes else index
    address = env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    return Node("aws-batch", node, nodes, address or (None if node else "127.0.0.1"), job=known)


def _skypilot(env: Env) -> Node | None:
    """SkyPilot: one process on each node.

    Source: https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html.
    """
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    nodes = _number(env, "SKYPILOT_NUM_NODES") if "SKYPILOT_NUM_NODES" in env else len(hosts)
    if hosts and len(hosts) != nodes:
        raise PlatformError(f"SKYPILOT_NUM_NODES={nodes}, but SKYPILOT_NODE_IPS has {len(hosts)}; correct one of them")
    node = _number(env, "SKYPILOT_NODE_RANK")
    return Node("skypilot", node, nodes, hosts[0] if hosts else None, job=env.get("SKYPILOT_TASK_ID"))


READERS = (_skypilot, _sagemaker, _vertex, _azureml, _kubeflow, _pods, _aws_batch)


def _number(env: Env, name: str) -> int:
    if not re.fullmatch(r"\d+", env.get(name, "")):
        was = f"{name}={env[name]} is not a number" if name in env else f"{name} is not set"
        raise PlatformError(f"{was}, though others of its platform are; set it, or unset them")
    return int(env[name])


def _json(name: str, text: str, *keys: str) -> Any:
    try:
        found = json.loads(text)
        if not isinstance(found, dict if keys else list) or not all(key in found for key in keys):
            raise ValueError(f"expected {', '.join(keys) or 'a list'}")
    except ValueError as error:
        raise PlatformError(f"{name}: cannot be read as JSON ({error}); correct it") from None
    return found
