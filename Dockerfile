# An image with this project and the versions in constraints.txt, for GPUs: docker build -t my-project .
# For CPUs, which is smaller: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
# PACKAGES are those for object storage; notebooks need jupyterlab and ipykernel, too.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ARG PACKAGES="adlfs gcsfs s3fs"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /app
# Changes of the code do not change these layers. What torch itself requires is installed with all other packages.
COPY constraints.txt pyproject.toml ./
RUN pip install -q --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && pip install -q -c constraints.txt -r requirements.txt $PACKAGES

FROM ${BASE}
# Any user can write to these folders, such as one that Kubernetes chooses.
RUN useradd --uid 1000 --create-home app \
    && install -d -m 777 /home/app /app/runs /app/data
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app/src PYTHONUNBUFFERED=1 HOME=/home/app USER=app
COPY . .
# By number, so that Kubernetes can check that it is not root.
USER 1000
# In exec form: Python is the first process, and receives the signals.
CMD ["python", "scripts/train.py"]
