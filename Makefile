# make quickstart: set up, then train a tiny policy end to end.   make test: set up, then all tests.
# make differential: the loss in every layout against one process, all generated cases.
SHELL := /bin/bash
PY := .venv/bin/python
CONFIG := configs/quickstart.yaml

.PHONY: quickstart test differential lint setup gpu-env clean

quickstart: setup
	@$(PY) tools/warm_start.py --config $(CONFIG) $(OVERRIDES)
	@launch/torchrun.sh --config $(CONFIG) --nproc-per-node 2 $(OVERRIDES)

test: setup lint
	$(PY) -m pytest tests

differential: setup
	OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.distributed.differential $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/shellcheck launch/*.sh launch/*.sbatch tools/env/*.sh

setup:
	@PYTHON="$(PYTHON)" tools/env/setup.sh cpu

gpu-env:
	@PYTHON="$(PYTHON)" tools/env/setup.sh gpu

clean:
	rm -rf .venv results build .pytest_cache .mypy_cache .ruff_cache
