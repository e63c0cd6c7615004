# One image for all nodes, with and without GPUs.
# Build it with `docker compose build`; docker-compose.yml passes on BASE_IMAGE and CA_BUNDLE from the environment.
# For a machine without GPUs, TORCH_INDEX is an index with torch's CPU builds, or /wheels for a folder of wheels:
#   docker build --build-arg TORCH_INDEX=/wheels --build-context wheels=FOLDER --tag orchestrate-node:0.1 .
ARG BASE_IMAGE=python:3.12.15-slim-bookworm@sha256:34386ef0cb081344d7ec1c103ba398e6e9f64e9ab3a1509accc92a4e24a07258
FROM scratch AS wheels

FROM ${BASE_IMAGE}
ARG TORCH_INDEX=

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# torch.compile needs a C++ compiler for its kernels, and a C compiler for Triton's launchers.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# The secret `ca` is a CA bundle, for a proxy that re-signs TLS; it is not stored in any layer.
# Packages must match the hashes in requirements.lock, which `make lock` updates. They belong to the user of the image,
# so that `RUN pip install` works in an image that is built from this one; nodes see them read-only.
RUN --mount=type=secret,id=ca,required=false \
    --mount=type=bind,source=requirements.lock,target=/tmp/requirements.lock \
    --mount=type=bind,from=wheels,target=/wheels \
    set -e; \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
    python3 -m venv /opt/venv; \
    if [ -z "$TORCH_INDEX" ]; then \
        pip install --require-hashes --requirement /tmp/requirements.lock; \
    else \
        awk '/^[a-z]/ { keep = !/^(torch|torchvision|triton|nvidia-.*|cuda-.*)==/ } keep' /tmp/requirements.lock \
            > /tmp/others.lock; \
        pip install --require-hashes --no-deps --requirement /tmp/others.lock; \
        case "$TORCH_INDEX" in *://*) from=--index-url ;; *) from="--no-index --find-links" ;; esac; \
        pip install --no-deps $from "$TORCH_INDEX" \
            $(sed -nE 's/^((torch|torchvision)==[^ ]+).*/\1/p' /tmp/requirements.lock); \
    fi; \
    chown -R 1000:1000 /opt/venv
# Official images have no bytecode of the standard library, and nodes cannot write it: each interpreter that imports
# torch would compile it again.
RUN python3 -m compileall -q -j 0 -x '/(test|tests|lib2to3|idlelib)/' \
    "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

# Writable for all: a named volume mounted here inherits the mode, and nodes may run as any user.
# Keep it empty: Docker copies its content when it creates a container, and fails if two do so at once.
RUN install -d -m 1777 /job
WORKDIR /workspace
# Readable for all, whatever the umask of the account that has cloned the project.
COPY --chmod=755 orchestrate /opt/orchestrate
COPY --chmod=755 app app
# The same for a node's own program.
RUN python3 -m compileall -q /opt/orchestrate/node
USER 1000:1000
ENTRYPOINT ["python", "/opt/orchestrate/node"]
