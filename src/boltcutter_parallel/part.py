"""What strategies beyond DDP, and faster steps, add to Boltcutter."""

from boltcutter.extend import Part

STRATEGIES = ("data_parallel", "float8", "fsdp", "horovod", "model_parallel", "pipeline", "tpu")
PART = Part(
    name="boltcutter_parallel",
    names={"EMA": "boltcutter_parallel.ema"},
    components=("boltcutter_parallel",),
    moved={
        **{f"boltcutter.strategy.{module}": f"boltcutter_parallel.{module}" for module in STRATEGIES},
        "boltcutter.callback.ema": "boltcutter_parallel.ema",
        "boltcutter.callback.skip_no_op_hooks": "boltcutter_parallel.skip_no_op_hooks",
    },
    removed={"boltcutter_parallel.pipeline.PipelineStrategy": {"process_group_backend": None}},
    ranks="boltcutter_parallel.mpi_environment:export_torchrun_env",
    offers={
        "backend.mpi4py": "boltcutter_parallel.mpi:register",
        "compiler.xla": "boltcutter_parallel.xla:XLA",
        "precision.float8": "boltcutter_parallel.float8:Float8Precision",
        "host_snapshot": "boltcutter_parallel.snapshot:HostSnapshot",
        "process_launcher": "boltcutter_parallel.process_launcher:MultiProcessingLauncher",
        "shared_memory": "boltcutter_parallel.shared_memory:SharedMemory",
        "model.mlp": "boltcutter_parallel.mlp",
        "sharding": "boltcutter_parallel.units",
        "sharded_checkpoint": "boltcutter_parallel.sharded_checkpoint",
        "spawning_strategy": "boltcutter_parallel.process_launcher:spawning_strategy",
        "unused_parameters": "boltcutter_parallel.unused_parameters:UnusedParameters",
    },
)
