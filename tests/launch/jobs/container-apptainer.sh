#!/bin/bash
export PYTHONPATH=/p/runs/digits/20261122-120000-1a2b3c4d/code/src
export NAME='it'"'"'s a b'
exec apptainer exec \
  --nv \
  --pwd /p \
  --bind /p:/p \
  --bind /p/runs/digits/20261122-120000-1a2b3c4d:/p/runs/digits/20261122-120000-1a2b3c4d \
  --bind /tmp:/tmp \
  --bind /usr:/data:ro \
  docker://registry.example/my-project:1 \
  python /p/runs/digits/20261122-120000-1a2b3c4d/code/scripts/train.py resume=/p/runs/digits/20261122-120000-1a2b3c4d
