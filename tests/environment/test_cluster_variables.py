import csv
import json
import os
import socket
import subprocess
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import QUICK, environment, saved_weights
from forkserver import Forked, ForkServer, communicate

from boltcutter.environment.cluster_variables import export_torchrun_env
from boltcutter.environment.platform_facts import PLATFORM, PlatformError, job_run_id, launched_layout

Env = dict[str, str]
Nodes = Callable[[int], Env]  # variables of a platform on node 0 or 1 of two
Script = Callable[..., subprocess.CompletedProcess[str]]

FIRST, SECOND = "127.0.0.1", "127.0.0.2"  # loopback addresses that simulate two nodes


def vertex(node: int, port: str = "2222", **more: str) -> Env:
    # https://cloud.google.com/vertex-ai/docs/training/distributed-training
    pools = {"workerpool0": [f"{FIRST}:{port}"], "workerpool1": [f"{SECOND}:{port}"]}
    task = {"type": f"workerpool{node}", "index": 0, "trial": ""}
    spec = {"cluster": pools, "environment": "cloud", "task": task, "job": "{}"}
    return {"CLUSTER_SPEC": json.dumps(spec), "CLOUD_ML_JOB_ID": "8070", **more}


def vertex_pytorch(node: int, port: str = "2222") -> Env:
    # https://cloud.google.com/ai-platform/training/docs/distributed-pytorch: ranks of nodes, set in its containers
    return vertex(node, RANK=str(node), WORLD_SIZE="2", MASTER_ADDR=FIRST, MASTER_PORT=port)


def sagemaker(node: int, port: str = "") -> Env:
    # https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    hosts = {"SM_HOSTS": json.dumps([SECOND, FIRST]), "SM_CURRENT_HOST": (FIRST, SECOND)[node]}
    return {**hosts, "SM_NUM_GPUS": "2", "SM_NETWORK_INTERFACE_NAME": "lo", "TRAINING_JOB_NAME": f"job-2026-{port}"}


def azureml_by_node(node: int, port: str = "6105") -> Env:
    # https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu, process_count_per_instance: 1
    ranks = {"NODE_RANK": str(node), "RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    rendezvous = {"MASTER_ADDR": FIRST, "MASTER_PORT": port}
    return {"AZUREML_RUN_ID": "jolly_fig_1", "AZUREML_NODE_COUNT": "2", **ranks, **rendezvous}


def pytorchjob(node: int, port: str = "23456") -> Env:
    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/, nprocPerNode: 2
    ranks = {"RANK": str(node), "WORLD_SIZE": "4", "MASTER_ADDR": FIRST, "MASTER_PORT": port}
    return {**trainjob(node, port), **ranks, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def trainjob(node: int, port: str = "29500") -> Env:
    # https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/, numProcPerNode: 2
    pet = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": str(node), "MASTER_ADDR": FIRST, "MASTER_PORT": port}
    return {f"PET_{name}": value for name, value in pet.items()}


def pods(node: int, port: str = "23456") -> Env:
    # https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_pytorch_plugin.md
    ranks = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": port}
    return {**ranks, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def aws_batch(node: int, port: str = "") -> Env:
    # https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html; here node 1 is the main one
    index = 1 - node
    first = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": FIRST} if node else {}
    numbers = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": str(index)}
    return {"AWS_BATCH_JOB_ID": f"9af{port}#{index}", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", **numbers, **first}


def skypilot(node: int, port: str = "") -> Env:
    # https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    nodes = {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": f"{FIRST}\n{SECOND}", "SKYPILOT_NUM_NODES": "2"}
    return {**nodes, "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_TASK_ID": f"sky-2026-11-21_gpt_{port}"}


BY_NODE: list[Callable[..., Env]] = [vertex, vertex_pytorch, sagemaker, azureml_by_node]
BY_NODE += [pytorchjob, trainjob, pods, aws_batch, skypilot]


def azureml(rank: int, port: str = "6105") -> Env:
    # As above, process_count_per_instance: 2
    ranks = {"NODE_RANK": str(rank // 2), "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
    return {
        "AZUREML_RUN_ID": "jolly_fig_1",
        "AZUREML_NODE_COUNT": "2",
        **ranks,
        "MASTER_ADDR": FIRST,
        "MASTER_PORT": port,
    }


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("platform", BY_NODE)
def test_variables_describe_the_node_but_no_ranks(platform: Callable[..., Env], node: int) -> None:
    env = platform(node)
    export_torchrun_env(env)
    assert (env["NODE_RANK"], env["BOLTCUTTER_NODES"], env["MASTER_ADDR"]) == (str(node), "2", FIRST)
    assert 1024 < int(env["MASTER_PORT"]) < 32_768
    assert not env.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"}
    assert launched_layout(env) == (env[PLATFORM], 2, 2 if platform in (pytorchjob, trainjob) else None)
    again = dict(env)
    export_torchrun_env(again)  # as in a child process
    assert again == env


@pytest.mark.parametrize("platform", BY_NODE)
def test_nodes_agree_on_the_rendezvous_and_the_run_id(platform: Callable[..., Env]) -> None:
    nodes = [platform(0), platform(1)]
    for env in nodes:
        export_torchrun_env(env)
    first, second = ({name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT")} for env in nodes)
    assert first == second
    names = {job_run_id(["seed=1"], env) for env in nodes}
    assert len(names) == 1
    # Names of Kubernetes jobs are not unique over time, so the processes agree on an ID instead.
    assert (None in names) == (platform in (pytorchjob, trainjob, pods))
    assert job_run_id(["seed=1"], nodes[0]) != job_run_id(["seed=2"], nodes[0]) or None in names


@pytest.mark.parametrize("rank", range(4))
def test_processes_of_azure_have_the_variables_of_torchrun(rank: int) -> None:
    env = azureml(rank)
    export_torchrun_env(env)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    assert [env[name] for name in names] == [str(rank), str(rank % 2), "4", "2", str(rank // 2), FIRST, "6105"]


def test_the_resource_config_of_sagemaker_is_read(tmp_path: Path) -> None:
    # https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    hosts = ["algo-1", "algo-10", "algo-2"]
    config = {"current_host": "algo-2", "hosts": hosts, "network_interface_name": "eth1"}
    (folder / "resourceconfig.json").write_text(json.dumps(config))
    env = {"SAGEMAKER_BASE_DIR": str(tmp_path), "TRAINING_JOB_NAME": "a"}
    export_torchrun_env(env)
    assert (env["NODE_RANK"], env["BOLTCUTTER_NODES"], env["MASTER_ADDR"]) == ("2", "3", "algo-1")
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "eth1"
    env = {"SAGEMAKER_BASE_DIR": str(tmp_path), "NCCL_SOCKET_IFNAME": "eth9"}
    export_torchrun_env(env)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth9")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (
            {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": FIRST, "SKYPILOT_TASK_ID": "sky-1_a_1"},
            "skypilot-sky-1_a_1",
        ),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "TRAINING_JOB_NAME": "b"}, "sagemaker-b"),
        ({"AZUREML_RUN_ID": "c"}, "azureml-c"),
        ({"AWS_BATCH_JOB_ID": "d:3", "AWS_BATCH_JOB_ATTEMPT": "2"}, "aws-batch-d-3"),
        ({"CLUSTER_SPEC": '{"cluster": {}, "task": {"trial": "7"}}', "CLOUD_ML_JOB_ID": "e"}, "vertex-e-7"),
    ],
)
def test_a_single_node_has_the_job_id_and_no_rendezvous(env: Env, name: str) -> None:
    export_torchrun_env(env)
    assert job_run_id([], env) == f"{name}-{zlib.crc32(b''):08x}"
    assert "MASTER_PORT" not in env
    assert launched_layout(env) == (env[PLATFORM], 1, None)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TF_CONFIG": "{}"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": FIRST},
        {"AZUREML_RUN_ID": "x", "NODE_RANK": "1", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    ],
)
def test_other_environments_are_not_changed(env: Env) -> None:
    before = dict(env)
    export_torchrun_env(env)
    assert env == before


@pytest.mark.parametrize(
    "launcher",
    [
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "3"},
        {"JSM_NAMESPACE_RANK": "3"},
        {"HOROVOD_RANK": "3"},
    ],
)
def test_ranks_of_a_launcher_are_not_changed_but_the_job_is_exported(launcher: Env) -> None:
    env = skypilot(1) | launcher
    export_torchrun_env(env)
    job = {"BOLTCUTTER_JOB": "skypilot-sky-2026-11-21_gpt_"}
    assert env == skypilot(1) | launcher | {PLATFORM: "skypilot"} | job


def test_mpirun_on_a_platform_has_the_address_of_the_first_node() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    env = sagemaker(1) | mpi
    export_torchrun_env(env)
    assert env["MASTER_ADDR"] == FIRST
    assert mpi.items() <= env.items()
    assert launched_layout(env) is None


def test_manually_set_ranks_are_not_changed() -> None:
    env = vertex(1, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4")
    export_torchrun_env(env)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "1", "4", "2")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (vertex(1, RANK="0"), "RANK=0, but this is node 1 of 2 according to vertex; unset RANK"),
        (vertex(1, RANK="1", WORLD_SIZE="3"), "WORLD_SIZE=3 does not match 2 nodes (node 1 of 2"),
        (trainjob(1) | {"WORLD_SIZE": "6"}, "WORLD_SIZE=6 does not match 2 nodes with 2 processes each"),
        (vertex(1, WORLD_SIZE="two"), "WORLD_SIZE=two is not a number"),
        (vertex(1, WORLD_SIZE="0"), "WORLD_SIZE=0 does not match 2 nodes"),
        (
            skypilot(1) | {"NODE_RANK": "0"},
            "NODE_RANK=0, but this is node 1 of 2 according to skypilot; unset NODE_RANK",
        ),
        (vertex(0, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4"), "RANK=3, LOCAL_RANK=1, WORLD_SIZE=4 do not match node 0"),
        (vertex(1, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"), "RANK=1, LOCAL_RANK=1, WORLD_SIZE=2 do not match node 1"),
        (skypilot(1) | {"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, RANK and WORLD_SIZE are not; set all or none"),
        (trainjob(2), "kubeflow: node 2 of 2 is invalid"),
        (aws_batch(0) | {"AWS_BATCH_JOB_NODE_INDEX": "5"}, "aws-batch: node 5 of 2 is invalid"),
        (
            skypilot(1) | trainjob(0),
            "node 1 of 2 according to skypilot, but node 0 of 2 according to kubeflow; unset the variables",
        ),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "MASTER_ADDR is not set, and kubeflow does not specify"),
        ({"PET_NODE_RANK": "1"}, "PET_NNODES is not set, but other variables of its platform are"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "1:3"}, "PET_NNODES=1:3 is not a number"),
        ({"PET_RDZV_ENDPOINT": "first:29400"}, "start it with torchrun"),
        (skypilot(1) | {"SKYPILOT_NODE_IPS": FIRST}, "SKYPILOT_NUM_NODES=2, but SKYPILOT_NODE_IPS has 1"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "SM_CURRENT_HOST=algo-2 is not in SM_HOSTS="),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS: cannot be read as JSON"),
        ({"CLUSTER_SPEC": "{}"}, "CLUSTER_SPEC: cannot be read as JSON (expected cluster, task)"),
        (vertex(3), "CLUSTER_SPEC: workerpool3 0 is in no worker pool that trains"),
    ],
)
def test_contradicting_variables_are_refused(env: Env, message: str) -> None:
    with pytest.raises(PlatformError) as error:
        export_torchrun_env(env)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "trainer.accelerator=cpu", "trainer.max_epochs=1"]


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train_in_each(
    forks: ForkServer, overrides: list[str], environments: list[Env], timeout: float = 150
) -> tuple[list[int | None], str]:
    """Start a training once in each environment, as a platform does; their exit statuses, and their output."""
    read, write = os.pipe()
    with ExitStack() as stack:
        processes: list[Forked] = []
        try:
            for env in environments:
                started = forks.start(["scripts/train.py", *overrides], environment(**env), write, write)
                processes.append(stack.enter_context(started))
        finally:
            os.close(write)
        output, ended = communicate(processes, [read], timeout)
        os.close(read)
        assert ended, output[0]
        return [process.returncode for process in processes], output[0]


def train_on_four_ranks(forks: ForkServer, folder: Path, environments: list[Env]) -> Path:
    """Train on two nodes of two ranks; check that they are ranks 0 to 3 of one run, which saw each sample once."""
    overrides = [*OVERRIDES, f"runs={folder}", "name=platform", "trainer.devices=2"]
    statuses, output = train_in_each(forks, overrides, environments)
    assert not any(statuses), output
    (run,) = (folder / "platform").iterdir()
    assert {log.name for log in (run / "logs").iterdir()} == {f"rank-{rank}.log" for rank in range(4)}
    with open(run / "evaluation" / "test" / "predictions.csv", newline="") as file:
        seen = [int(row["index"]) for row in csv.DictReader(file)]
    assert seen == list(range(len(seen)))
    assert len(seen) > 4
    return run


@pytest.mark.slow
@pytest.mark.parametrize("platform", BY_NODE)
def test_two_nodes_with_two_devices_train_one_run(
    platform: Callable[..., Env], forks: ForkServer, port: str, tmp_path: Path
) -> None:
    train_on_four_ranks(forks, tmp_path, [platform(node, port=port) for node in (0, 1)])


@pytest.mark.slow
def test_four_processes_of_azure_train_one_run_as_one_process(
    forks: ForkServer, script: Script, port: str, tmp_path: Path
) -> None:
    run = train_on_four_ranks(forks, tmp_path, [azureml(rank, port=port) for rank in range(4)])
    done = script("train", *OVERRIDES, f"folder={tmp_path}/one")
    assert done.returncode == 0, done.stderr
    four, one = saved_weights(run), saved_weights(tmp_path / "one")
    assert max(float((four[name] - one[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.slow
def test_a_restarted_job_resumes_its_run(forks: ForkServer, port: str, tmp_path: Path) -> None:
    nodes = [skypilot(node, port=port) for node in (0, 1)]
    before = train_on_four_ranks(forks, tmp_path, nodes)
    after = train_on_four_ranks(forks, tmp_path, nodes)
    assert before == after
    assert len(json.loads((after / "record.json").read_text())["attempts"]) == 2


@pytest.mark.slow
def test_a_node_whose_peer_does_not_start_reports_the_rendezvous_address(forks: ForkServer, tmp_path: Path) -> None:
    (status,), output = train_in_each(forks, [*OVERRIDES, f"runs={tmp_path}", "timeout=3"], [skypilot(1)])
    assert status == 1
    (line,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: MASTER_ADDR=127.0.0.1, MASTER_PORT=")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.num_nodes=3"],
            "trainer.devices=1, trainer.num_nodes=3: kubeflow has started 2 nodes with 2 processes each; ",
        ),
        (
            [],
            "trainer.devices=1, trainer.num_nodes=2: kubeflow has started 2 nodes with 2 processes each; ",
        ),
        (["trainer=dp", "trainer.devices=2"], "trainer.strategy=DataParallelStrategy trains on one node, but kubeflow"),
    ],
)
def test_overrides_that_contradict_the_platform_are_refused(
    overrides: list[str], message: str, script: Script, tmp_path: Path
) -> None:
    done = script("check", *OVERRIDES, *overrides, f"runs={tmp_path}", env=trainjob(0))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_each_node_reports_invalid_variables(script: Script, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, f"runs={tmp_path}", env=vertex(1, RANK="3", WORLD_SIZE="4"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: RANK=3, but this is node 1 of 2 according to vertex; unset RANK")
    assert done.stderr.count("\n") == 1
    done = script("train", *OVERRIDES, f"runs={tmp_path}", env=vertex(1, RANK="3", WORLD_SIZE="2"))
    assert done.returncode == 2
    assert done.stderr == "error on rank 3: RANK=3: expected less than WORLD_SIZE=2, as it counts from 0; correct one\n"


def test_the_number_of_nodes_follows_from_the_platform(script: Script) -> None:
    done = script("train", "--print", env=skypilot(0))
    assert "  num_nodes: 2\n" in done.stdout
