#!/bin/bash
exec docker run --rm \
  --name digits-20261122-120000-1a2b3c4d \
  --user 1001:1002 \
  --workdir /p \
  --shm-size 16g \
  --stop-timeout 600 \
  --gpus all \
  --env HOME=/tmp \
  --env USER=ada \
  --env PYTHONPATH=/p/runs/digits/20261122-120000-1a2b3c4d/code/src \
  --env 'NAME=it'"'"'s a b' \
  --env WANDB_API_KEY \
  --volume /p:/p \
  --volume /p/runs/digits/20261122-120000-1a2b3c4d:/p/runs/digits/20261122-120000-1a2b3c4d \
  --volume /tmp:/tmp \
  --volume /usr:/data:ro \
  --network=host \
  registry.example/my-project:1 \
  python -m torch.distributed.run --standalone --nproc-per-node 2 /p/runs/digits/20261122-120000-1a2b3c4d/code/scripts/train.py resume=/p/runs/digits/20261122-120000-1a2b3c4d
