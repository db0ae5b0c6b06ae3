"""Nodes that a cloud platform has started: its variables translated to those of Lightning and torchrun.

Each platform has its own variables for the rank of this node, the number of nodes and the address of the first one.
Lightning then starts a process for each device. If the platform itself starts a process for each device, each process
gets all the variables that torchrun would set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter.environment import slurm_tasks
from boltcutter.environment.platform_facts import DEVICES, JOB, NODES, PLATFORM, Env, PlatformError, job_port
from boltcutter.environment.process import in_slurm_step

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# By which a process that this one starts would take itself for one of the launcher's: beginnings of names.
LAUNCHER_VARIABLES = (
    *("SLURM_", "TORCHELASTIC_", "PET_", "OMPI_", "PMI_", "BOLTCUTTER_RUN_ID", "BOLTCUTTER_NODES", "BOLTCUTTER_TRIAL"),
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "JSM_NAMESPACE_RANK", "HOROVOD_RANK"}  # set by launchers that set all ranks
POOLS = ("workerpool0", "workerpool1")  # worker pools that train, in the order of ranks


@dataclass(frozen=True)
class NodeInfo:
    """This node, as described by its platform.

    Args:
        platform: Name of the platform.
        node_rank: Rank of this node, from 0.
        num_nodes: Number of nodes.
        master_addr: Address of the first node.
        master_port: Port on the first node.
        devices: Number of processes on each node.
        job: Unique ID of the job, unchanged by a restart.
        interface: Network interface between the nodes, if the platform specifies it.
    """

    platform: str
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: str | None = None
    devices: int | None = None
    job: str | None = None
    interface: str | None = None


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that Lightning or torchrun's processes expect, if a platform has started this process.

    Args:
        env: Environment variables of this process, changed in place.

    Raises:
        PlatformError: The variables contradict each other.
    """
    if PLATFORM in env or (info := detect(env)) is None:
        return
    env[PLATFORM] = info.platform
    if info.job:
        env[JOB] = re.sub(r"[^\w.-]", "-", f"{info.platform}-{info.job}")
    if info.interface and info.num_nodes > 1:
        for name in INTERFACE_VARIABLES:
            env.setdefault(name, info.interface)
    if env.keys() & LAUNCHERS or in_slurm_step(env):
        return
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        if info.master_addr:
            env.setdefault("MASTER_ADDR", info.master_addr)
        return  # processes of mpirun, each with its rank
    if info.num_nodes > 1 and not (info.master_addr or env.get("MASTER_ADDR")):
        raise PlatformError(
            f"MASTER_ADDR is not set, and {info.platform} does not specify the address of the first of its "
            f"{info.num_nodes} nodes; set it to that address"
        )
    local_world_size = _local_world_size(env, info)
    variables: dict[str, Any] = {NODES: info.num_nodes, "NODE_RANK": info.node_rank}
    if "LOCAL_RANK" in env:
        variables["LOCAL_WORLD_SIZE"] = local_world_size
    elif local_world_size:
        variables[DEVICES] = local_world_size
    if info.num_nodes > 1 or "LOCAL_RANK" in env:
        port = info.master_port or (job_port(info.job) if info.job else 29500)
        rendezvous = {"MASTER_ADDR": info.master_addr or "127.0.0.1", "MASTER_PORT": port}
        variables |= {name: value for name, value in rendezvous.items() if not env.get(name)}
    env.update({name: str(value) for name, value in variables.items()})


def read_ranks() -> None:
    """Set the variables of this process: as a node of a platform, or as a task of SLURM.

    Raises:
        PlatformError: The variables contradict each other.
    """
    export_torchrun_env()
    slurm_tasks.prepare()


def detect(env: Env) -> NodeInfo | None:
    """Detect the platform that started this process.

    Args:
        env: Environment variables of this process.

    Raises:
        PlatformError: The variables are invalid, or those of two platforms contradict each other.
    """
    infos = [info for read in READERS if (info := read(env))]
    for info in infos:
        if not 0 <= info.node_rank < info.num_nodes:
            raise PlatformError(
                f"{info.platform}: node {info.node_rank} of {info.num_nodes} is invalid, as nodes count from 0; "
                "correct its variables"
            )
    several = [info for info in infos if info.num_nodes > 1]
    for info in several[1:]:
        if (info.node_rank, info.num_nodes) != (several[0].node_rank, several[0].num_nodes):
            raise PlatformError(
                f"this is node {several[0].node_rank} of {several[0].num_nodes} according to {several[0].platform}, "
                f"but node {info.node_rank} of {info.num_nodes} according to {info.platform}; unset the variables of "
                "one of them"
            )
    return next(iter(several or infos), None)


def _local_world_size(env: MutableMapping[str, str], info: NodeInfo) -> int | None:
    """Check that the rank variables match the node, and remove them if they only count nodes.

    Returns:
        Number of processes on each node, if the variables or the platform determine it.
    """
    here = f"node {info.node_rank} of {info.num_nodes} according to {info.platform}"
    if "NODE_RANK" in env and _number(env, "NODE_RANK") != info.node_rank:
        raise PlatformError(f"NODE_RANK={env['NODE_RANK']}, but this is {here}; unset NODE_RANK")
    world = _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else None
    each = None if world is None else world // info.num_nodes
    if world is not None and (world < 1 or world % info.num_nodes or each not in (1, info.devices or each)):
        of = f" with {info.devices} processes each" if info.devices else ""
        raise PlatformError(f"WORLD_SIZE={world} does not match {info.num_nodes} nodes{of} ({here}); unset WORLD_SIZE")
    if "LOCAL_RANK" in env:
        if "RANK" not in env or each is None:
            raise PlatformError(f"LOCAL_RANK={env['LOCAL_RANK']} is set, RANK and WORLD_SIZE are not; set all or none")
        rank, local = _number(env, "RANK"), _number(env, "LOCAL_RANK")
        if not 0 <= local < each or rank != info.node_rank * each + local:
            raise PlatformError(
                f"RANK={rank}, LOCAL_RANK={local}, WORLD_SIZE={world} do not match {here}; unset all three, and "
                "Lightning starts a process for each device"
            )
        if each > 1:
            return each
    elif "RANK" in env and _number(env, "RANK") != info.node_rank:
        raise PlatformError(f"RANK={env['RANK']}, but this is {here}; unset RANK, or set LOCAL_RANK as well")
    for name in RANK_VARIABLES:
        env.pop(name, None)
    return info.devices or (each if each and each > 1 else None)


def _vertex(env: Env) -> NodeInfo | None:
    """Google's Vertex AI: ``RANK`` and ``WORLD_SIZE`` count nodes there.

    Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training (``CLUSTER_SPEC``, pools);
    https://cloud.google.com/ai-platform/training/docs/distributed-pytorch (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``).
    """
    if "CLUSTER_SPEC" not in env:
        return None
    spec = _json("CLUSTER_SPEC", env["CLUSTER_SPEC"], "cluster", "task")
    pools, task = spec["cluster"], spec["task"]
    hosts = [(pool, number, host) for pool in POOLS for number, host in enumerate(pools.get(pool, ()))]
    part, index = str(task.get("type", "")), int(task.get("index", 0))
    node = next((node for node, host in enumerate(hosts) if host[:2] == (part, index)), 0 if not pools else None)
    if node is None:
        raise PlatformError(
            f"CLUSTER_SPEC: {part} {index} is in no worker pool that trains; do not start training there"
        )
    address, _, port = hosts[0][2].partition(":") if hosts else ("", "", "")
    ids = [env.get("CLOUD_ML_JOB_ID"), task.get("trial")]
    known = "-".join(str(part) for part in ids if part) if ids[0] else None
    return NodeInfo("vertex", node, max(1, len(hosts)), address or None, port or None, job=known)


def _sagemaker(env: Env) -> NodeInfo | None:
    """Amazon SageMaker: variables of its toolkit, or ``resourceconfig.json``, which exists in each container.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md;
    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    (``resourceconfig.json``, hosts in alphabetical order, ``network_interface_name``, ``TRAINING_JOB_NAME``).
    """
    file = Path(env.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/resourceconfig.json")
    if "SM_HOSTS" in env:
        hosts, current = _json("SM_HOSTS", env["SM_HOSTS"]), env.get("SM_CURRENT_HOST")
        interface = env.get("SM_NETWORK_INTERFACE_NAME")
    elif file.is_file():
        config = _json(str(file), file.read_text(), "hosts", "current_host")
        hosts, current, interface = config["hosts"], config["current_host"], config.get("network_interface_name")
    else:
        return None
    hosts = sorted(hosts)
    if current not in hosts:
        raise PlatformError(f"SM_CURRENT_HOST={current} is not in SM_HOSTS={json.dumps(hosts)}; correct one of them")
    job = env.get("TRAINING_JOB_NAME")
    return NodeInfo("sagemaker", hosts.index(current), len(hosts), hosts[0], job=job, interface=interface)


def _azureml(env: Env) -> NodeInfo | None:
    """Azure Machine Learning, ``distribution: pytorch``, one process on each node or one for each device.

    Source: https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (``NODE_RANK``, ``RANK``,
    ``process_count_per_instance``).
    """
    if "AZUREML_RUN_ID" not in env:
        return None
    if "AZUREML_NODE_COUNT" not in env:
        # With NODE_RANK, every process has its rank, which is sufficient.
        return None if "NODE_RANK" in env else NodeInfo("azureml", job=env["AZUREML_RUN_ID"])
    node = _number(env, "NODE_RANK") if "NODE_RANK" in env else 0
    return NodeInfo("azureml", node, _number(env, "AZUREML_NODE_COUNT"), job=env["AZUREML_RUN_ID"])


def _kubeflow(env: Env) -> NodeInfo | None:
    """Kubeflow's PyTorchJob (whose ``WORLD_SIZE`` may count nodes or processes) and TrainJob (``PET_…`` only).

    Source: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/;
    https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/; torchrun reads the same variables,
    https://docs.pytorch.org/docs/stable/elastic/run.html.
    """
    if "PET_NODE_RANK" not in env:
        if "PET_RDZV_ENDPOINT" in env and "TORCHELASTIC_RUN_ID" not in env:
            raise PlatformError("PET_RDZV_ENDPOINT: an elastic job does not set ranks; start it with torchrun")
        return None
    each = env.get("PET_NPROC_PER_NODE", "")
    return NodeInfo(
        "kubeflow",
        _number(env, "PET_NODE_RANK"),
        _number(env, "PET_NNODES"),
        env.get("PET_MASTER_ADDR"),
        env.get("PET_MASTER_PORT"),
        devices=int(each) if each.isdecimal() else None,
    )


def _pods(env: Env) -> NodeInfo | None:
    """Other Kubernetes operators, whose ranks count pods: Volcano, PyTorchJob before ``PET_…``, Alibaba's PAI.

    Source: https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_pytorch_plugin.md;
    https://www.alibabacloud.com/help/en/pai/general-environment-variables.
    """
    if not {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    if env.keys() & {"LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_NODE_RANK", "CLUSTER_SPEC"}:
        return None
    return NodeInfo("kubernetes", _number(env, "RANK"), _number(env, "WORLD_SIZE"), env["MASTER_ADDR"])


def _aws_batch(env: Env) -> NodeInfo | None:
    """AWS Batch, where the main node may have any index, and does not know its own address.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html.
    """
    if "AWS_BATCH_JOB_ID" not in env:
        return None
    known = env["AWS_BATCH_JOB_ID"].partition("#")[0]  # the node index follows
    if "AWS_BATCH_JOB_NUM_NODES" not in env:
        return NodeInfo("aws-batch", job=known)
    nodes, index = _number(env, "AWS_BATCH_JOB_NUM_NODES"), _number(env, "AWS_BATCH_JOB_NODE_INDEX")
    node = (index - _number(env, "AWS_BATCH_JOB_MAIN_NODE_INDEX")) % nodes if 0 <= index < nodes else index
    address = env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    return NodeInfo("aws-batch", node, nodes, address or (None if node else "127.0.0.1"), job=known)


def _skypilot(env: Env) -> NodeInfo | None:
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
    return NodeInfo("skypilot", node, nodes, hosts[0] if hosts else None, job=env.get("SKYPILOT_TASK_ID"))


READERS = (_skypilot, _sagemaker, _vertex, _azureml, _kubeflow, _pods, _aws_batch)


def _number(env: Env, name: str) -> int:
    if not re.fullmatch(r"[0-9]+", env.get(name, "")):
        fault = f"{name}={env[name]} is not a number" if name in env else f"{name} is not set"
        raise PlatformError(f"{fault}, but other variables of its platform are; set it, or unset them")
    return int(env[name])


def _json(name: str, text: str, *keys: str) -> Any:
    try:
        found = json.loads(text)
        if not isinstance(found, dict if keys else list) or not all(key in found for key in keys):
            raise ValueError(f"expected {', '.join(keys) or 'a list'}")
    except ValueError as error:
        raise PlatformError(f"{name}: cannot be read as JSON ({error}); correct it") from None
    return found
