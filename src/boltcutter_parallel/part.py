"""What strategies beyond DDP, and faster steps, add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_parallel",
    names={"EMA": "boltcutter_parallel.ema"},
    components=("boltcutter_parallel",),
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
