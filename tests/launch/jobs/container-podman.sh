#!/bin/bash
exec podman run --rm \
  --name digits-20261122-120000-1a2b3c4d \
  --userns keep-id \
  --workdir /p \
  --shm-size 16g \
  --stop-timeout 600 \
  --device nvidia.com/gpu=all \
  --env HOME=/tmp \
  --env USER=ada \
  --env PYTHONPATH=/p/runs/digits/20261122-120000-1a2b3c4d/code/src \
  --env 'NAME=it'"'"'s a b' \
  --env WANDB_API_KEY \
  --volume /p:/p \
  --volume /p/runs/digits/20261122-120000-1a2b3c4d:/p/runs/digits/20261122-120000-1a2b3c4d \
  --volume /tmp:/tmp \
  --volume /usr:/data:ro \
  registry.example/my-project:1 \
  python /p/runs/digits/20261122-120000-1a2b3c4d/code/scripts/train.py resume=/p/runs/digits/20261122-120000-1a2b3c4d
