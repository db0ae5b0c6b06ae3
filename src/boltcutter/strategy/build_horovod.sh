#!/usr/bin/env bash
# Build Horovod's last release, of 2023, against the torch that is installed, and install it:
#   bash build_horovod.sh [python]
# It takes about ten minutes on two cores, once: the wheel stays in ~/.cache/boltcutter/wheels. It needs g++ and CMake.
# Processes talk through gloo; HOROVOD_GPU_OPERATIONS=NCCL and HOROVOD_WITH_MPI=1 go on to Horovod's own build.
set -euo pipefail
python=${1:-python}
version=0.28.1
tag=$("$python" -c 'import sys, torch; print(f"torch{torch.__version__}-python{sys.version_info[0]}.{sys.version_info[1]}")')
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/boltcutter/wheels/$tag${HOROVOD_GPU_OPERATIONS:+-gpu}${HOROVOD_WITH_MPI:+-mpi}
if ! ls "$wheels"/horovod-$version-*.whl >/dev/null 2>&1; then
    for tool in g++ cmake make; do
        command -v $tool >/dev/null || { echo "error: $tool is missing; on Debian: apt-get install g++ cmake make" >&2; exit 2; }
    done
    mkdir -p "$wheels"
    scratch=$(mktemp -d "$wheels/build.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    # It asks for C++14, torch's headers for C++17; of two such options the compiler takes the last.
    printf '#!/bin/sh\nexec %s "$@" -std=c++17\n' "$(command -v g++)" >"$scratch/g++"
    chmod +x "$scratch/g++"
    export CXX=$scratch/g++ MAKEFLAGS=${MAKEFLAGS:--j$(nproc)} CMAKE_POLICY_VERSION_MINIMUM=3.5 # its CMake files are old
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
    [ -n "${HOROVOD_WITH_MPI:-}" ] || export HOROVOD_WITHOUT_MPI=1
    "$python" -m pip install -q 'setuptools<81' wheel packaging
    "$python" -m pip wheel -v --no-build-isolation --no-deps --no-cache-dir -w "$scratch" horovod==$version >"$scratch/log" 2>&1 ||
        { tail -n 40 "$scratch/log" >&2; echo "error: Horovod was not built; the last lines of its log are above" >&2; exit 1; }
    mv "$scratch"/horovod-$version-*.whl "$wheels"
fi
"$python" -m pip install -q cloudpickle psutil pyyaml packaging
"$python" -m pip install -q --force-reinstall --no-deps "$wheels"/horovod-$version-*.whl
"$python" -c 'import horovod.torch as hvd; hvd.init(); assert hvd.gloo_built(); print("Horovod is installed")'
