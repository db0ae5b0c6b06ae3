"""Part: strategies beyond data parallel training: FSDP, pipelines, MPI, Horovod, XLA, and sharded checkpoints."""
