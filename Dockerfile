# docs/image.md describes how to build, run and check this image.
# The base has only Python and its headers: the torch wheel brings the CUDA libraries. Releases pin the base by digest.
ARG BASE=python:3.11.13-slim-bookworm
FROM ${BASE}
# The lock file in requirements/ to install: cuda or cpu.
ARG LOCK=cuda

LABEL org.opencontainers.image.title="Gearbox" \
      org.opencontainers.image.description="One training script for language models; an Accelerate config chooses the engine" \
      org.opencontainers.image.licenses="Apache-2.0"

# Triton needs gcc at run time. NCCL needs libibverbs and its providers for InfiniBand; without them it uses sockets.
# PID 1 is tini: it forwards signals and reaps orphans of dead ranks.
# Versions are not pinned: Debian mirrors keep only the newest of a release, and the base's digest fixes the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev tini \
        libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log \
    && groupadd --gid 10001 gearbox \
    && useradd --uid 10001 --gid 10001 --create-home gearbox \
    && install --directory --mode 1777 /cache /data /gearbox/runs

# Every file is checked by its hash. DeepSpeed is published only as source, so the locked setuptools builds it; pip
# would fetch another version. The secret is an optional pip.conf for a private index; no layer keeps it.
COPY requirements/${LOCK}.lock /gearbox/requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=tmpfs,target=/mnt \
    python3 -m venv /opt/venv \
    && sed -n '/^setuptools==/,/[^\\]$/p' "/gearbox/requirements/${LOCK}.lock" >/mnt/setuptools.lock \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes --requirement /mnt/setuptools.lock \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes --no-build-isolation --use-pep517 \
        --requirement "/gearbox/requirements/${LOCK}.lock"

# All writes go to /cache, /gearbox/runs and /tmp, so the root may be read-only and any user works.
# Python takes USER as the name of a uid that has none.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/home/gearbox \
    USER=gearbox \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    CUDA_CACHE_PATH=/cache/cuda \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TORCH_EXTENSIONS_DIR=/cache/torch_extensions
WORKDIR /gearbox
COPY . .
RUN python -m compileall -q src
USER 10001:10001

# Fail the build unless versions match the lock, everything imports and a recipe trains, as the image's user, offline.
RUN --mount=type=tmpfs,target=/mnt \
    export TMPDIR=/mnt XDG_CACHE_HOME=/mnt HF_HOME=/mnt TORCHINDUCTOR_CACHE_DIR=/mnt HF_HUB_OFFLINE=1 \
    && python docker/verify.py "requirements/${LOCK}.lock" \
    && python src/train.py recipes/tiny.yaml train.steps=3 schedule.warmup=1 eval.every=0 run.dir=/mnt/runs

VOLUME ["/cache", "/data", "/gearbox/runs"]
HEALTHCHECK --interval=5m --timeout=1m --start-period=2m CMD ["python", "/gearbox/src/doctor.py", "--machine"]
ENTRYPOINT ["tini", "--", "/gearbox/docker/entrypoint.sh"]
CMD ["src/launch.py", "fsdp"]
