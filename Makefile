# Everything runs in .venv, which `make setup` builds; each target builds it if need be.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GEAR ?= fsdp
PACKAGES := iproute2 util-linux hostname slurm-wlm munge buildah debootstrap docker-compose
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help setup packages train quick test lint faults matrix cells commands cluster slurm-test image image-test bench \
	schema smollm2 lock clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## .venv with the pinned versions of constraints.txt

# torch first and by its exact version, so that no other package asks for another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Gearbox needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

packages:  ## Debian packages with which more tests run: hosts, Slurm, images, disk operations; as root
	apt-get update -qq
	apt-get install -y -qq $(PACKAGES)

train: $(STAMP)  ## the default recipe under GEAR=fsdp
	$(BIN)/accelerate launch --config_file accelerate_configs/$(GEAR).yaml src/train.py

quick: $(STAMP)  ## the tests that start neither ranks nor Python: two minutes
	$(BIN)/pytest -m unit -n 2 --dist worksteal

test: $(STAMP)  ## all tests but the long ones, in two processes
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(STAMP)  ## fix style and spelling; check types, Dockerfile and shell scripts
	$(BIN)/pre-commit run --all-files
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	find .ci/run docker $(wildcard cluster) -name run -o -name '*.sh' -o -name '*.sbatch' | xargs $(BIN)/shellcheck

faults: $(STAMP)  ## every fault for real, 20 minutes as root with strace; it goes on where it was stopped
	$(BIN)/python tests/support/battery.py

matrix: $(STAMP)  ## every gear with every method, by running it: docs/matrix.md, a quarter of an hour
	$(BIN)/python tests/support/matrix.py

cells: $(STAMP)  ## whether the table of the matrix is still true: its diagonal, and each day another part of the rest
	$(BIN)/pytest -m cells

cluster: $(STAMP)  ## two hosts train together and lose each other, as root; twenty minutes
	$(BIN)/pytest -m cluster

slurm-test: $(STAMP)  ## jobs on a real Slurm of two nodes, as root with slurm-wlm and munge; three quarters of an hour
	$(BIN)/pytest -m slurm

commands: $(STAMP)  ## every command of README and docs, as a user runs it
	$(BIN)/pytest -m commands

bench: $(STAMP) smollm2  ## how fast data is prepared, what a checkpoint costs, how long stages idle; FILE=alpaca.json
	-$(BIN)/python benchmarks/prepare.py $(FILE)
	$(BIN)/python benchmarks/million.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/pipeline.py

schema: $(STAMP)  ## recipes/schema.json, by which editors complete and underline
	$(BIN)/python src/schema.py

smollm2: $(STAMP)  ## models/smollm2-135m, a real model of 135M weights
	$(BIN)/python src/fetch_smollm2.py

# What the image installs: the versions of constraints.txt, each file by its hash. Torch's CPU build is on a page of its own.
TORCH_CPU := https://download.pytorch.org/whl/cpu/torch/
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --constraint constraints.txt --generate-hashes \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make lock'

lock: $(STAMP)  ## requirements/*.lock from pyproject.toml and constraints.txt
	$(COMPILE) --output-file requirements/cuda.lock
	$(COMPILE) --output-file requirements/cpu.lock --find-links $(TORCH_CPU) --emit-find-links

image:  ## the Docker image: LOCK=cuda or cpu
	docker build --build-arg LOCK=$(or $(LOCK),cuda) --tag gearbox:$(VERSION) .

image-test: $(STAMP)  ## the image built for real, and run: ten minutes as root with buildah and debootstrap
	$(BIN)/pytest -m image

clean:  ## remove .venv and caches; runs/ and models/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
