# syntax=docker/dockerfile:1
# Two targets: `cpu` (the default, last) and `cuda`. Both run the API or a worker as a user without
# rights. The CUDA build of torch is the one that PyPI serves for Linux; the CPU build is smaller and
# comes from the index named in TORCH_INDEX, or is taken from PyPI too where that is left empty.

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/epsilond
ENV PATH=/opt/epsilond/bin:$PATH
WORKDIR /src
COPY pyproject.toml README.md ./
COPY accounting accounting
COPY api api
COPY models models
COPY worker worker

FROM build AS build-cpu
ARG TORCH_INDEX=""
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" torch==2.13.0; fi \
 && pip install .

FROM build AS build-cuda
RUN pip install .

FROM python:3.11-slim-bookworm AS runtime
RUN useradd --system --uid 10001 --home-dir /var/lib/epsilond --create-home epsilond \
 && chmod 0700 /var/lib/epsilond
ENV PATH=/opt/epsilond/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    EPSILOND_HOME=/var/lib/epsilond \
    EPSILOND_HOST=0.0.0.0
USER epsilond
WORKDIR /var/lib/epsilond
VOLUME /var/lib/epsilond
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=6 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
CMD ["epsilond", "serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/epsilond /opt/epsilond

FROM runtime AS cpu
COPY --from=build-cpu /opt/epsilond /opt/epsilond
