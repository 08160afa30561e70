# docker build -t gearbox .            CUDA machines: pip's torch wheel brings its own CUDA libraries
# mkdir -p runs    # yours: --user writes there as you; the image's own user could not
# docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD/runs:/gearbox/runs" gearbox \
#   accelerate launch --config_file accelerate_configs/fsdp.yaml src/train.py
ARG BASE=python:3.11.13-slim-bookworm
FROM ${BASE}

# gcc and the Python headers: Triton and DeepSpeed compile small kernels at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev make git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 gearbox && mkdir /gearbox && chown gearbox /gearbox
USER gearbox
WORKDIR /gearbox

# Dependencies first: they change less often than the code, and stay in their own layer.
COPY --chown=gearbox Makefile pyproject.toml constraints.txt README.md ./
RUN mkdir -p src/gearbox && touch src/gearbox/__init__.py && make setup && rm -rf ~/.cache/pip

COPY --chown=gearbox . .
ENV PATH=/gearbox/.venv/bin:$PATH PYTHONUNBUFFERED=1
CMD ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp.yaml", "src/train.py"]
