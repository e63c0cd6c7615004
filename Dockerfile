# One image for every node: GPU and CPU, rank 0 and rank 15.
# `docker compose build` builds it; BASE_IMAGE and CA_BUNDLE in the environment reach it through docker-compose.yml.
ARG BASE_IMAGE=python:3.12.15-slim-bookworm@sha256:34386ef0cb081344d7ec1c103ba398e6e9f64e9ab3a1509accc92a4e24a07258
FROM ${BASE_IMAGE}

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# torch.compile builds its kernels with a C++ compiler, and Triton's launchers with a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# The secret `ca` is a CA bundle for people behind a proxy that re-signs TLS; it never enters a layer.
# A package whose hash is not that of the lock is refused, wherever it comes from; `make lock` renews the lock.
RUN --mount=type=secret,id=ca,required=false \
    --mount=type=bind,source=requirements.lock,target=/tmp/requirements.lock \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/venv && \
    pip install --no-cache-dir --disable-pip-version-check --require-hashes --requirement /tmp/requirements.lock

# Anyone may write here: a named volume mounted over it inherits the mode, whichever user the nodes run as.
# It stays empty: Docker copies what is in it when it creates a container, and fails where two do so at once.
RUN install -d -m 1777 /job
WORKDIR /workspace
COPY orchestrate /opt/orchestrate
COPY app app
USER 1000:1000
ENTRYPOINT ["python", "/opt/orchestrate/node"]
