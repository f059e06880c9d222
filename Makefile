# A fresh machine needs Python >= 3.11 (with venv), pip and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
PACKAGES := core plugins/genlm-hf plugins/genlm-trie-cuda plugins/genlm-mlx plugins/genlm-ray plugins/genlm-llamacpp plugins/genlm-backend plugins/genlm-lm-eval
# On Linux these depend on builds of vLLM and SGLang for GPUs; `install_cpu` installs others.
SERVING  := plugins/genlm-vllm plugins/genlm-sgl

# SGLang needs versions of its own, so an environment of its own.
SGL        := .venv-sgl
SGL_READY  := $(SGL)/.ready
SGL_PACKAGES := core plugins/genlm-hf plugins/genlm-backend

SITE := .venv-site

# Distribution name of the published interface in `make dist`; it is imported as genlm.backend
# under any name. Publishing under the name genlm-backend needs the consent of its owners.
BACKEND_NAME ?= genlm-backend

# More OpenMP threads than free cores make torch several times slower.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

# Runs may go on at once, so each has a cache of its own.
PYTEST = python -m pytest -o cache_dir=.pytest_cache/$@

.PHONY: demo test newest oldest newest-issue oldest-issue test-core test-main test-plugins test-sgl test-vllm check format surface release-check mutants chaos bench gpu docs site dist clean

demo: $(DEMO)  ## particles of the embedded model under a hard constraint
	$(BIN)/genlm demo

# Both environments are installed at once, and the longest tests begin first, so that two cores
# are busy until the end.
test:  ## `make check` and all tests, on two cores
	$(MAKE) --jobs 2 --output-sync=target check test-plugins test-vllm test-main test-core test-sgl

test-core: $(READY)  ## the tests of the core
	$(BIN)/$(PYTEST) core/tests

test-main: $(READY)  ## the tests across packages
	$(BIN)/$(PYTEST) tests plugins/genlm-sgl/tests/without_sglang

# Of the tests for a GPU, those that can run on a CPU; `make gpu` runs all of them on a GPU.
test-plugins test-vllm: export GENLM_TEST_DEVICE ?= cpu

test-plugins: $(READY)  ## the tests of the plugins that need neither vLLM's processes nor SGLang
	$(BIN)/$(PYTEST) $(patsubst %,%/tests,$(filter plugins/%,$(PACKAGES)))

test-vllm: $(READY)  ## the tests of genlm-vllm, in a process of their own, on vLLM itself
	$(BIN)/$(PYTEST) plugins/genlm-vllm/tests
	VLLM_USE_V2_MODEL_RUNNER=1 $(BIN)/$(PYTEST) $(addprefix plugins/genlm-vllm/tests/test_,engine.py residents.py reductions.py scores.py waiting_groups.py) -k "not more_contexts_than_there_are_blocks"

test-sgl: $(SGL_READY)  ## the tests of genlm-sgl, on SGLang itself
	$(SGL)/bin/$(PYTEST) plugins/genlm-sgl/tests --ignore plugins/genlm-sgl/tests/without_sglang
	$(SGL)/bin/$(PYTEST) plugins/genlm-backend/tests/on_sglang

newest oldest:  ## the tests with the newest or lowest versions of dependencies; build/$@/report.md
	$(PYTHON) scripts/releases.py run $@

newest-issue oldest-issue:  ## an issue on GitHub with the report of `make newest` or `make oldest`
	$(PYTHON) scripts/releases.py issue $(@:-issue=)

check: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)  ## write Python files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

surface: $(READY)  ## what programs for the last release can no longer do
	$(BIN)/python scripts/check_surface.py

release-check: surface  ## that TAG=v1.2.3 may be published
	$(BIN)/python scripts/check_release.py "$$TAG"

mutants: $(READY)  ## break engines and tries one by one: which check sees it
	$(BIN)/python -m tests.mutants

chaos: $(READY) $(SGL_READY)  ## requests of every kind from all sides, for hours; append to benchmarks/results/
	$(BIN)/python -m tests.chaos reference --requests 1000000 --save
	$(BIN)/python -m tests.chaos hf --requests 100000 --save
	$(BIN)/python -m tests.chaos hf --requests 100000 --seed 1 --options '{"kv_budget_bytes": 20000}' --save
	$(BIN)/python -m tests.chaos mlx --requests 100000 --save
	$(BIN)/python -m tests.chaos llamacpp --requests 100000 --options '{"n_ctx": 128, "n_seq_max": 6}' --save
	$(BIN)/python -m tests.chaos ray --requests 20000 --save
	$(BIN)/python -m tests.chaos vllm --requests 100000 --save
	$(BIN)/python -m tests.chaos vllm --model "own processes" --requests 20000 --kill-worker --save
	$(SGL)/bin/python -m tests.chaos sgl --requests 100000 --save

bench: $(READY) $(SGL_READY)  ## run the benchmarks and append to benchmarks/results/
	for bench in $(filter-out %_sgl.py %_serving_particles.py %_serving_reductions.py %_gpu.py,$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$bench --save || exit 1; done
	for bench in particles reductions; do $(BIN)/python benchmarks/bench_serving_$$bench.py vllm --save || exit 1; done
	$(SGL)/bin/python benchmarks/bench_sgl.py --save
	for bench in particles reductions; do $(SGL)/bin/python benchmarks/bench_serving_$$bench.py sgl --save || exit 1; done

gpu:  ## tests, checks and benchmarks on a GPU, with what PYTHON has installed; write docs/gpu.md
	$(PYTHON) scripts/gpu.py $(GPU_OPTIONS)

docs: $(READY) $(SGL_READY)  ## write again what is generated from the code and from runs
	$(BIN)/python scripts/generate_plugin_docs.py --run
	$(BIN)/python scripts/commands_page.py
	for backend in hf mlx vllm; do $(BIN)/python scripts/architectures.py --backend $$backend || exit 1; done
	$(SGL)/bin/python scripts/architectures.py --backend sgl
	$(BIN)/python scripts/plot_figures.py
	$(BIN)/python scripts/particle_animation.py
	$(BIN)/python scripts/run_notebooks.py
	$(BIN)/python scripts/gpu_page.py

site: $(SITE)/.ready  ## the documentation as a web site in build/site/
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

dist: $(DEMO)  ## wheels and sdists of every distribution, in dist/
	rm -rf dist
	for package in $(filter-out plugins/genlm-backend,$(PACKAGES)) $(SERVING); do (cd $$package && $(abspath $(BIN))/hatchling build -d $(abspath dist)) || exit 1; done
	copy=$$(mktemp -d) && cp -r plugins/genlm-backend/. $$copy && cd $$copy && sed -i.bak 's/^name = "genlm-backend"$$/name = "$(BACKEND_NAME)"/' pyproject.toml && rm pyproject.toml.bak && $(abspath $(BIN))/hatchling build -d $(abspath dist) && rm -r $$copy

clean:
	rm -rf $(VENV) $(SGL) $(SITE) .venv-newest .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(DEMO): requirements.txt core/pyproject.toml plugins/genlm-hf/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "genlm needs Python >= 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -e core -e plugins/genlm-hf
	touch $@

$(READY): $(DEMO) requirements-dev.txt requirements-site.txt $(PACKAGES:%=%/pyproject.toml) $(SERVING:%=%/pyproject.toml)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation $(PACKAGES:%=-e %)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps $(SERVING:%=-e %)
	$(BIN)/python -m genlm_vllm.install_cpu
	touch $@

$(SITE)/.ready: requirements-site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet -r requirements-site.txt
	touch $@

$(SGL_READY): requirements-sgl.txt $(SGL_PACKAGES:%=%/pyproject.toml) plugins/genlm-sgl/pyproject.toml plugins/genlm-sgl/src/genlm_sgl/requirements-cpu.txt
	$(PYTHON) -m venv $(SGL)
	$(SGL)/bin/python -m pip install --quiet --upgrade 'pip>=24'
	$(SGL)/bin/python -m pip install --quiet -r requirements-sgl.txt
	$(SGL)/bin/python -m pip install --quiet --no-build-isolation $(SGL_PACKAGES:%=-e %)
	$(SGL)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e plugins/genlm-sgl
	$(SGL)/bin/python -m genlm_sgl.install_cpu --quiet
	touch $@
