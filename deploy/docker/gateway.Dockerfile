# docker build --file deploy/docker/gateway.Dockerfile --tag quire-gateway:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /src
COPY . .
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
RUN uv venv /opt/quire \
  && uv pip install --python /opt/quire/bin/python --constraint deploy/docker/constraints.txt ".[gateway,records,jwt,images,audio,tracing]"

FROM python:3.11.14-slim-bookworm
COPY --from=build /opt/quire /opt/quire
RUN --mount=type=bind,source=scripts/sbom.py,target=/build/sbom.py \
  /opt/quire/bin/python /build/sbom.py image quire-gateway:0.1.0 >/opt/quire/sbom.cdx.json
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
LABEL org.opencontainers.image.title="quire-gateway" \
  org.opencontainers.image.version="0.1.0" \
  org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
CMD ["quire-gateway"]
