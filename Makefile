# Commands for contributors. `make help` lists them.
SHELL := /bin/bash
VENV   ?= .venv
# the interpreter of the environment: make setup PYTHON=python3.12
PYTHON ?= auto
# pip arguments for torch: make setup TORCH="torch --index-url URL"
TORCH  ?= auto
# version of NeMo: make setup NEMO="nemo_toolkit[asr]==2.7.3"; empty: the range of pyproject.toml
NEMO   ?=
# resolves the lowest versions: pip install uv
UV     ?= uv
PYTEST_ARGS ?=
# compute capabilities that `make kernels` compiles for: ARCHITECTURES="80 90"; empty: all
ARCHITECTURES ?=
# number of processes of a whole test run
PYTEST_PROCESSES ?= 2
BENCH_ARGS  ?=
# NeMo's scripts after `git clone https://github.com/NVIDIA-NeMo/NeMo build/NeMo`
NEMO_EXAMPLES ?= build/NeMo/examples/asr

BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# marks an environment that is sufficient for the demo
DECODING := $(VENV)/.decoding-ready
# All tests of a file run in one process, which caches its models. Each process has one thread (below): with more threads
# than cores, OpenMP's threads wait for each other.
ALL_TESTS := -n $(PYTEST_PROCESSES) --dist loadfile
# durations of tests: a list, and a JUnit file in build/
REPORTS = --durations=40 --junitxml=build/junit-$@.xml
BENCH_OUT := build/bench.json
# an environment is updated when one of these files changes
RECIPE := pyproject.toml scripts/make_venv.sh scripts/choose_torch.py

GOLDENS = $(BIN)/python scripts/goldens.py

run_tests = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(1) \
  || { echo "tests failed: repeat one with  make pytest PYTEST_ARGS='-k name -x'"; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all compiler lint packages lowest kernels machine-code kernels-nvrtc fix pytest coverage goldens bench test-nemo27 test-nemo-scripts docs clean

help:  ## show this list
	@echo "make <target>, and what it does (each target that needs the environment makes it first):"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' \
	  | awk -F'\t' '{ printf "  %-17s %s\n", $$1, $$2 }'
	@echo "test needs g++; test-all also uses ffmpeg and Chromium, or skips their tests: apt install g++ ffmpeg chromium"

setup: $(STAMP)  ## make .venv and install everything (PYTHON=..., TORCH=... override the choices)

$(STAMP): $(RECIPE)
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" NEMO="$(NEMO)" bash scripts/make_venv.sh
	@touch $(DECODING) $@

$(DECODING): $(RECIPE)
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" NEMO="$(NEMO)" EXTRAS=demo bash scripts/make_venv.sh
	@touch $@

demo: $(DECODING)  ## greedy against beam, + LM, + phrases on the shipped speech; rows and a picture in build/
	@$(BIN)/python scripts/demo.py out=build/demo.json plot=build/demo.png
	@echo "the commands are in $(BIN)/: source $(BIN)/activate"

test: compiler  ## before each commit, under 8 minutes: lint, types, kernels for two GPU generations, fast tests
	@$(MAKE) --no-print-directory -j2 lint packages kernels ARCHITECTURES="$(or $(ARCHITECTURES),80 90)"
	@$(call run_tests,-m "not slow" $(ALL_TESTS) $(REPORTS))

test-all: compiler  ## what `make test` leaves out, under 30 minutes: the other GPU generations, the slow tests
	@$(MAKE) --no-print-directory machine-code kernels-nvrtc
	@$(call run_tests,-m slow $(ALL_TESTS) $(REPORTS))

compiler:
	@command -v g++ >/dev/null || { echo "no g++, which compiles CUDA kernels for the emulator: apt install g++"; exit 1; }

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check . \
	  || { echo "lint failed: 'make fix' repairs what ruff can repair; the rest is listed above"; exit 1; }
	@$(BIN)/mypy \
	  || { echo "mypy failed: the types above disagree; see [tool.mypy] in pyproject.toml"; exit 1; }

packages: $(STAMP)  ## pip check: whether the installed packages are compatible
	@! $(BIN)/python -m pip check | grep -vE '^(No broken|pyctcdecode [^ ]+ has requirement numpy<2)' \
	  || { echo "packages failed: the versions above are not compatible: rm -rf $(VENV) && make setup"; exit 1; }

lowest:  ## whether the lowest versions of pyproject.toml can be installed together (Python 3.10, needs uv)
	@mkdir -p build
	@$(UV) pip compile --quiet --resolution lowest-direct --python-version 3.10 --only-binary :all: \
	  --no-binary antlr4-python3-runtime --extra wfst --extra serve --extra cluster pyproject.toml -o build/lowest.txt \
	  && echo "build/lowest.txt"

kernels: $(STAMP)  ## compile every CUDA kernel for every GPU generation; registers and memory, spills fail
	@$(BIN)/python scripts/check_kernels.py $(if $(ARCHITECTURES),--arch $(ARCHITECTURES)) \
	  || { echo "kernels failed: a kernel does not compile or spills registers, see above"; exit 1; }

machine-code: $(STAMP)  ## read the machine code of every kernel for the other GPU generations; local memory fails
	@$(BIN)/python scripts/check_sass.py --arch $(or $(ARCHITECTURES),75 86 89 100 120) \
	  || { echo "machine-code failed: a kernel uses local memory or calls an unknown function, see above"; exit 1; }

kernels-nvrtc: build/nvrtc-12.4 build/nvrtc-12.9 build/nvrtc-13.0  ## compile every kernel with NVRTC 12.4, 12.9 and 13.0
	@for folder in $^; do library=$$(ls $$folder/nvidia/*/lib/libnvrtc.so.1[23]); \
	  LD_LIBRARY_PATH="$${library%/*}" LD_PRELOAD="$$library" PYTHONPATH="$$folder" \
	  $(BIN)/python scripts/check_kernels.py --arch 90 --nvrtc "$${folder#build/nvrtc-}" || { echo \
	  "kernels-nvrtc failed: a kernel does not compile with $$folder or spills registers, see above"; exit 1; }; done

build/nvrtc-12.%: $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ \
	  "nvidia-cuda-nvrtc-cu12==12.$*.*" "cuda-bindings>=12.9,<13" cuda-pathfinder && touch $@

build/nvrtc-13.%: $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ "nvidia-cuda-nvrtc==13.$*.*" && touch $@

fix: $(STAMP)  ## repair and format the code with ruff
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

pytest: $(STAMP)  ## all tests; PYTEST_ARGS="-k name -x" narrows them
	@$(call run_tests,$(or $(PYTEST_ARGS),$(ALL_TESTS) $(REPORTS)))

coverage: $(STAMP)  ## all tests with line coverage; a sixth slower
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ALL_TESTS) --cov --cov-report=term:skip-covered --cov-fail-under=90

goldens: $(STAMP)  ## results of this tree and of a commit, to the bit: BASE=HEAD~1; MESSAGES=1: also of the tests' errors
	@test -n "$(BASE)" || { echo "goldens compares with a commit: make goldens BASE=HEAD~1"; exit 1; }
	@rm -rf build/goldens/tree && git worktree add --quiet --force --detach build/goldens/tree "$(BASE)"
	@$(GOLDENS) record build/goldens/base --tree=build/goldens/tree
	@$(GOLDENS) record build/goldens/now
	@$(if $(MESSAGES),$(GOLDENS) messages build/goldens/base --tree=build/goldens/tree $(ALL_TESTS) -q; \
	  $(GOLDENS) messages build/goldens/now $(ALL_TESTS) -q;) $(GOLDENS) compare build/goldens/base build/goldens/now

bench: $(STAMP)  ## beside NeMo, flashlight, pyctcdecode, in 3 minutes; BENCH_ARGS="key=value ..."
	@mkdir -p $(dir $(BENCH_OUT))
	@$(BIN)/python -m benchmarks out=$(BENCH_OUT) $(BENCH_ARGS)

test-nemo27: .venv-nemo27/.setup-done  ## the plugin's tests on NeMo 2.7.3, in an environment of its own
	@.venv-nemo27/bin/python -m pytest -m nemo $(PYTEST_ARGS)

.venv-nemo27/.setup-done: $(RECIPE)
	@VENV=.venv-nemo27 PYTHON="$(PYTHON)" TORCH="$(TORCH)" NEMO="nemo_toolkit[asr]==2.7.3" bash scripts/make_venv.sh
	@touch $@

test-nemo-scripts: $(STAMP)  ## NeMo's own scripts with every strategy; needs a clone: NEMO_EXAMPLES=...
	@$(BIN)/python -c "import editdistance" 2>/dev/null || $(BIN)/python -m pip install --quiet editdistance
	@NEMO_EXAMPLES="$(NEMO_EXAMPLES)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs $(PYTEST_ARGS) \
	  tests/nemo_plugin/test_nemo_scripts.py

docs: $(STAMP)  ## the site of docs/ in build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict && echo "open build/site/index.html"

clean:  ## remove environments, caches and build outputs
	rm -rf $(VENV) .venv-nemo27 build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
