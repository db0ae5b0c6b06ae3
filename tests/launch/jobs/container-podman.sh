#!/bin/bash
exec podman run --rm \
  --name digits-20261122-120000-1a2b3c4d \
  --user 1000:1000 \
  --workdir /p \
  --shm-size 16g \
  --stop-timeout 600 \
  --device nvidia.com/gpu=all \
  --mount type=bind,source=/p,target=/p \
  --mount type=bind,source=/tmp,target=/tmp \
  --mount type=bind,source=/usr,target=/data,readonly \
  --env HOME=/tmp \
  --env USER=ada \
  --env PYTHONPATH=/p/runs/digits/20261122-120000-1a2b3c4d/code/src \
  --env 'NAME=it'"'"'s a b' \
  --env WANDB_API_KEY \
  registry.example/my-project:1 \
  python /p/runs/digits/20261122-120000-1a2b3c4d/code/scripts/train.py resume=/p/runs/digits/20261122-120000-1a2b3c4d
