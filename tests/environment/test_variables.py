import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.environment.process import is_rank_zero
from boltcutter.environment.variables import check_variables


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "tcp://10.0.0.1:80"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("WANDB_MODE", "bogus"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "\u0661"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "1.0"),
        ("NODE_RANK", "a"),
        ("SLURM_PROCID", "x"),
        ("SLURM_NTASKS", "0"),
        ("SLURM_JOB_ID", "12_3"),
        ("OMP_NUM_THREADS", "many"),
        ("OMP_NUM_THREADS", "0"),
        ("CUDA_VISIBLE_DEVICES", "0 1"),
        ("CUDA_VISIBLE_DEVICES", "cuda:0"),
        ("PL_GLOBAL_SEED", "-1"),
        ("PL_GLOBAL_SEED", "seed"),
        ("BOLTCUTTER_DEVICES", "two"),
        ("BOLTCUTTER_DEBUG", "yes"),
        ("BOLTCUTTER_PARENT_PID", "12:"),
    ],
)
def test_a_value_that_its_readers_do_not_take_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=[^\n]*; [^\n]*unset it$"):
        check_variables({name: value})
    assert is_rank_zero({name: value})  # so that it is reported


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"WANDB_MODE": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4,2"},
        {"WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": "0, 3", "PL_GLOBAL_SEED": "4294967295"},
        {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43-ac33,MIG-GPU-5ebe/1/0"},
        {"BOLTCUTTER_PARENT_PID": "12", "BOLTCUTTER_LAUNCHER_PID": "12"},
        {"BOLTCUTTER_PARENT_PID": "4194304:15"},  # of a tool of mcp
        {"CUDA_VISIBLE_DEVICES": "-1", "SLURM_NTASKS_PER_NODE": "8(x2)", "BOLTCUTTER_DEBUG": "1"},
    ],
)
def test_values_that_are_taken(env: dict[str, str]) -> None:
    check_variables(env)


def test_a_rank_is_less_than_the_world_size() -> None:
    with pytest.raises(ConfigError, match=r"^RANK=4: .*WORLD_SIZE=4"):
        check_variables({"RANK": "4", "WORLD_SIZE": "4"})
