# An image with this project and the versions in constraints.txt, for GPUs: docker build -t my-project .
# For CPUs, which is smaller: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
# For drivers older than CUDA 13 and for V100: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
# For several nodes with GPUs: --build-arg NETWORK=efa on AWS, and NETWORK=infiniband elsewhere.
# For the same base each time: --build-arg BASE=python:3.11-slim@sha256:<as docker buildx imagetools inspect prints it>
# For the same installer of EFA each time: --build-arg EFA=<URL of a version> --build-arg EFA_SHA256=<as sha256sum prints it>
# PACKAGES are those for object storage; notebooks need jupyterlab and ipykernel, too.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ARG PACKAGES="adlfs gcsfs s3fs"
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /app
# Changes of the code do not change these layers. What torch itself requires is installed with all other packages.
COPY constraints.txt pyproject.toml ./
RUN pip install -q --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch
# Builds for another CUDA require, and pin, other versions of its packages.
RUN case "$TORCH_INDEX" in */whl/cu*) sed -i -E '/^(cuda|nvidia)-/d' constraints.txt ;; esac \
    && python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && pip install -q -c constraints.txt -r requirements.txt $PACKAGES

FROM ${BASE}
ARG NETWORK=""
ARG EFA=https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz
ARG EFA_SHA256=""
# What NCCL loads. EFA's installer brings NCCL's plugin too; the driver is that of the machine.
# hadolint ignore=DL3003,DL3008
RUN [ -z "$NETWORK" ] || { \
        apt-get update \
        && apt-get install -y --no-install-recommends ca-certificates curl ibverbs-providers libibverbs1 librdmacm1 \
        && if [ "$NETWORK" = efa ]; then \
            curl -fsSL "$EFA" -o /tmp/efa.tar.gz \
            && echo "$EFA_SHA256  /tmp/efa.tar.gz" > /tmp/efa.sum \
            && { [ -z "$EFA_SHA256" ] || sha256sum -c /tmp/efa.sum; } \
            && tar -xzf /tmp/efa.tar.gz -C /tmp && cd /tmp/aws-efa-installer \
            && ./efa_installer.sh -y --skip-kmod --skip-limit-conf \
            && echo /opt/amazon/ofi-nccl/lib > /etc/ld.so.conf.d/ofi-nccl.conf && ldconfig; \
        fi \
        && rm -rf /var/lib/apt/lists/* /tmp/efa.tar.gz /tmp/efa.sum /tmp/aws-efa-installer; \
    }
# Any user can write to these folders, such as one that Kubernetes chooses.
RUN useradd --uid 1000 --create-home app && install -d -m 777 /home/app /app/runs /app/data
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app/src PYTHONUNBUFFERED=1 HOME=/home/app USER=app
COPY . .
# By number, so that Kubernetes can check that it is not root.
USER 1000
# In exec form: Python is the first process, and receives the signals.
CMD ["python", "scripts/train.py"]
