# docker build --file deploy/docker/worker.Dockerfile --target cpu  --tag quire-worker:0.1.0-cpu .
# docker build --file deploy/docker/worker.Dockerfile --target cuda --tag quire-worker:0.1.0-cuda .
FROM python:3.11.14-slim-bookworm AS source
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /src
COPY . .
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy

# The CPU build of torch, much smaller than the CUDA build.
FROM source AS build-cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN uv venv /opt/quire \
  && uv pip install --python /opt/quire/bin/python --index-url "$TORCH_INDEX" "$TORCH" \
  && uv pip install --python /opt/quire/bin/python --constraint deploy/docker/constraints.txt ".[worker,tracing]" \
  && ln -s lib/python3.11/site-packages/quire_client/demo_model /opt/quire/demo-model

# torch from the package index includes the CUDA libraries. The driver is on the node.
FROM source AS build-cuda
ARG TORCH=torch==2.13.0
RUN uv venv /opt/quire \
  && uv pip install --python /opt/quire/bin/python "$TORCH" \
  && uv pip install --python /opt/quire/bin/python --constraint deploy/docker/constraints.txt ".[cuda,tracing]" \
  && ln -s lib/python3.11/site-packages/quire_client/demo_model /opt/quire/demo-model

# Includes a compiler, because kernels are compiled for the processor or GPU of the node.
FROM python:3.11.14-slim-bookworm AS runtime
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
  && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp \
  USER=quire QUIRE_CACHE_DIR=/var/cache/quire TRITON_CACHE_DIR=/var/cache/quire/triton
LABEL org.opencontainers.image.title="quire-worker" \
  org.opencontainers.image.version="0.1.0" \
  org.opencontainers.image.licenses="Apache-2.0"
RUN install --directory --owner 10001 --group 10001 /var/cache/quire

FROM runtime AS cuda
COPY --from=build-cuda /opt/quire /opt/quire
RUN --mount=type=bind,source=scripts/sbom.py,target=/build/sbom.py \
  /opt/quire/bin/python /build/sbom.py image quire-worker:0.1.0-cuda >/opt/quire/sbom.cdx.json
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
CMD ["quire-worker"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/quire /opt/quire
RUN --mount=type=bind,source=scripts/sbom.py,target=/build/sbom.py \
  /opt/quire/bin/python /build/sbom.py image quire-worker:0.1.0-cpu >/opt/quire/sbom.cdx.json
USER 10001:10001
CMD ["quire-worker"]
