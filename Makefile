# Everything runs in .venv. Targets create it if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GEAR ?= fsdp
RECIPE ?= recipes/tiny.yaml
PACKAGES := iproute2 util-linux hostname slurm-wlm munge buildah debootstrap docker-compose chromium fonts-liberation
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help setup packages train quick test lint faults attacks matrix zoo prove simulate cards templates cells commands \
	cluster slurm-test gpu image image-test extras-test clouds-test bench pictures schema smollm2 lock clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv with the versions pinned in constraints.txt

# Install the exact torch version first, so that no other package pulls in another build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Gearbox needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(if $(wildcard $(STAMP)),,--clear) $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

packages:  ## install Debian packages that more tests need (hosts, Slurm, images, pictures); needs root
	apt-get update -qq
	apt-get install -y -qq $(PACKAGES)

train: $(STAMP)  ## train the default recipe with GEAR=fsdp
	$(BIN)/accelerate launch --config_file accelerate_configs/$(GEAR).yaml src/train.py

quick: $(STAMP)  ## run the unit tests, which start neither ranks nor Python (2 min)
	$(BIN)/pytest -m unit -n 2 --dist worksteal

test: $(STAMP)  ## run all tests except the long ones, in three processes, since many tests wait
	$(BIN)/pytest -n 3 --dist worksteal

lint: $(STAMP)  ## fix style and spelling; check types, Dockerfile and shell scripts
	$(BIN)/pre-commit run --all-files
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	find .ci/run docker $(wildcard cluster) -name run -o -name '*.sh' -o -name '*.sbatch' | xargs $(BIN)/shellcheck

faults: $(STAMP)  ## inject every fault into real runs (20 min; needs root and strace; resumes if stopped)
	$(BIN)/python tests/support/battery.py

attacks: $(STAMP)  ## use hundreds of damaged and made-up files, and write their table to docs/reliability.md (5 min)
	$(BIN)/python tests/support/attacks.py

matrix: $(STAMP)  ## run every method under every gear, and write docs/matrix.md (15 min)
	$(BIN)/python tests/support/matrix.py

zoo: $(STAMP)  ## rehearse every model family under several gears, and write docs/models.md (30 min; resumes if stopped)
	$(BIN)/python tests/support/zoo.py

prove: $(STAMP)  ## run RECIPE=recipes/mine.yaml under every gear, and write a page and a badge (3 min)
	$(BIN)/python src/prove.py '$(subst ','\'',$(RECIPE))'

simulate: $(STAMP)  ## simulate every recipe under every gear that can be, and compare with the closed form (40 min; resumes)
	PYTHONPATH=src:tests $(BIN)/python tests/support/simulations.py

cards: $(STAMP)  ## prove the families that people use, and write docs/models/ (30 min; resumes if stopped)
	$(BIN)/python tests/support/cards.py

templates: $(STAMP)  ## encode chats with public templates, and write the table of docs/data.md (10 min; fetches them)
	$(BIN)/python tests/support/template_files.py
	$(BIN)/python tests/support/templates.py

cells: $(STAMP)  ## check docs/matrix.md and docs/models.md by a daily sample, and make other attacks each day
	$(BIN)/pytest -m cells

cluster: $(STAMP)  ## train on two hosts that lose their connection (20 min; needs root)
	$(BIN)/pytest -m cluster

slurm-test: $(STAMP)  ## run jobs on a real two-node Slurm (45 min; needs root, slurm-wlm and munge)
	$(BIN)/pytest -m slurm

gpu: $(STAMP)  ## run every gear and method on this machine's GPUs, and write docs/gpu.md (40 min; resumes if stopped)
	$(BIN)/python tests/support/gpu.py

commands: $(STAMP)  ## run every command of README and docs as a user would
	$(BIN)/pytest -m commands

# Trackers and clouds have their own packages, some of which need other versions than ours. Each has an environment:
# skypilot needs a click before 8.2, and wandb a newer one.
EXTRAS := .venv-extras
CLOUDS := .venv-clouds
$(EXTRAS)/.installed $(CLOUDS)/.installed: .venv-%/.installed: requirements/%.txt $(STAMP)
	$(PYTHON) -m venv .venv-$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo .venv-$*/lib/python3*/site-packages)/main.pth
	.venv-$*/bin/pip install --quiet --requirement requirements/$*.txt
	touch $@

extras-test: $(EXTRAS)/.installed  ## test trackers with the packages of requirements/extras.txt
	$(EXTRAS)/bin/python $(BIN)/pytest -m extras

clouds-test: $(CLOUDS)/.installed  ## parse the clouds' files by their tools, and run SkyPilot's on a bucket (10 min; needs root)
	$(CLOUDS)/bin/python $(BIN)/pytest -m clouds

bench: $(STAMP) smollm2  ## compare with other trainers, and measure data, checkpoints, exports and pipelines; FILE=alpaca.json
	$(BIN)/python benchmarks/peers $(if $(FILE),--file $(FILE)) $(PEERS)
	-$(BIN)/python benchmarks/prepare.py $(FILE)
	$(if $(FILE),$(BIN)/python benchmarks/preferences.py $(FILE))
	$(BIN)/python benchmarks/many_rows.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/exporting.py
	$(BIN)/python benchmarks/pipeline.py

pictures: $(STAMP)  ## measure and draw docs/pictures and the proof table of README (15 min)
	$(BIN)/python benchmarks/pictures

schema: $(STAMP)  ## write recipes/schema.json for editors, docs/recipe.md and docs/gear-keys.md
	$(BIN)/python src/schema.py

smollm2: $(STAMP)  ## create models/smollm2-135m, a real model with 135M weights
	$(BIN)/python src/fetch_smollm2.py

# The image installs the versions of constraints.txt and verifies each file's hash. Torch's CPU builds have their own index.
TORCH_CPU := https://download.pytorch.org/whl/cpu/torch/
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --constraint constraints.txt --generate-hashes \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make lock'

lock: $(STAMP)  ## write requirements/*.lock from pyproject.toml and constraints.txt
	$(COMPILE) --output-file requirements/cuda.lock
	$(COMPILE) --output-file requirements/cpu.lock --find-links $(TORCH_CPU) --emit-find-links

image:  ## build the Docker image with LOCK=cuda or cpu
	docker build --build-arg LOCK=$(or $(LOCK),cuda) --tag gearbox:$(VERSION) .

image-test: $(STAMP)  ## build the image and run it (10 min; needs root, buildah and debootstrap)
	$(BIN)/pytest -m image

clean:  ## remove .venv and caches, but keep runs/ and models/
	rm -rf $(VENV) $(EXTRAS) $(CLOUDS) .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
