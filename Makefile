# A fresh machine needs Python >= 3.11 (with venv), pip and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
PACKAGES := core plugins/genlm-hf plugins/genlm-trie-cuda plugins/genlm-vllm plugins/genlm-backend

# More OpenMP threads than free cores make torch several times slower.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: demo test check mutants bench docs clean

demo: $(DEMO)  ## particles of the embedded model under a hard constraint
	$(BIN)/genlm demo

test: $(READY)  ## everything that CI runs
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest plugins/genlm-vllm/tests

check: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

mutants: $(READY)  ## break engines and tries one by one: which check sees it
	$(BIN)/python -m tests.mutants

bench: $(READY)  ## run the benchmarks and append to benchmarks/results/
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench --save || exit 1; done

docs: $(READY)  ## write again what is generated from the code and from runs
	$(BIN)/python scripts/generate_plugin_docs.py --run
	$(BIN)/python scripts/hf_architectures.py
	$(BIN)/python scripts/plot_particles.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(DEMO): requirements.txt core/pyproject.toml plugins/genlm-hf/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "genlm needs Python >= 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -e core -e plugins/genlm-hf
	touch $@

$(READY): $(DEMO) requirements-dev.txt $(PACKAGES:%=%/pyproject.toml)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation $(PACKAGES:%=-e %)
	$(BIN)/python -m genlm_vllm.install_cpu
	touch $@
