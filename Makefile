# make serve    set everything up and serve the demo model
# make test     set everything up and run all tests
# make quick    the tests that need no server and no torch, in a minute
# make help     the rest
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --no-input
SOURCES := ktserve api cluster engine scheduler native rules training loadtests demo benchmarks testing tests

.DEFAULT_GOAL := help
.PHONY: help serve chat train-demo train-service-demo setup quick test test-kernels test-gpu test-clients test-ray wheel test-wheel lint format load soak chaos fuzz bench-cpu bench-gpu sanitize clean

help:
	@echo 'make serve      set everything up and serve the demo model (ARGS="--port 9000 ..." is passed on)'
	@echo 'make chat       talk to the demo model in this terminal'
	@echo 'make train-demo train the demo adapters into a running server on this CPU; before, after, and what they score'
	@echo 'make train-service-demo two jobs and reinforcement learning with Tinker'"'"'s client in a running server, beside chats'
	@echo 'make quick      the tests that need no server and no torch: scheduler, rules, texts, fields, grammars, headers'
	@echo 'make test       set everything up and run all tests'
	@echo 'make test-kernels  the kernels for GPUs in the interpreter of Triton, on this CPU, and whether they compile'
	@echo 'make test-gpu   on a machine with an NVIDIA GPU: set up, run tests/gpu and tests/bridge, record the outcome in benchmarks/results'
	@echo 'make test-clients  install LangChain, LiteLLM, openai-node, Claude Code, Codex, opencode, Continue, Cline, aider and more; run them against a server'
	@echo 'make test-ray   install Ray; run replicas without a model on clusters of this machine'
	@echo 'make wheel      one file in dist/ that pip installs on machines without a compiler, for CPUs from AVX2 to AMX'
	@echo 'make test-wheel fetch what the wheel asks for into an empty environment; serve, chat and plan there'
	@echo 'make lint       ruff, mypy, import directions, clang-format'
	@echo 'make load       [SCENARIO=chat|tenants|adapters|long_prefill|churn|soak] [UI=1]: a minute of locust against a server of its own'
	@echo 'make soak       two minutes of chats, floods, hang-ups and adapter churn; fails if what the server holds grows'
	@echo 'make chaos      ten minutes of floods, hang-ups, broken bodies and folders, engine kills; prints how requests ended (ARGS="--family gpt_oss")'
	@echo 'make fuzz       ten minutes of mutated files for every reader, and of requests by the OpenAPI document and by hand'
	@echo 'make bench-cpu  MODELS=DIR [LLAMA=BINARIES] [OUT=FILE]: measure a CPU against its peaks and llama.cpp; table in docs/'
	@echo 'make sanitize   the native tests plain (and on an emulated Haswell, with qemu-user), under ASan and UBSan, under TSan'
	@echo 'make bench-gpu  [LLAMA=BINARIES MODELS=DIR]: an NVIDIA GPU beside this CPU, at Qwen3-30B-A3B size (80 GB of memory); JSON in benchmarks/results/'
	@echo 'make clean      remove what was built here, the venv included'

serve: setup
	@$(VENV)/bin/ktserve serve $(ARGS)

chat: setup
	@$(VENV)/bin/ktserve chat $(ARGS)

train-demo: setup $(VENV)/.train
	@$(PY) -m demo.tuning.run $(ARGS)

train-service-demo: setup $(VENV)/.clients
	@$(PY) -m demo.tuning.service $(ARGS)

# Less than a minute on two cores. The longest files come first; pytest's plugins of other tools take seconds to load.
API_QUICK := segments detokenize fast fields generation limits link options protocol stops template tenants tenants_file \
  tokenizer
CLUSTER_QUICK := config manifest policy scaling shared
QUICK := tests/scheduler $(API_QUICK:%=tests/api/test_%.py) \
  $(filter-out %/test_qwen_files.py,$(wildcard tests/rules/test_*.py)) tests/files \
  $(CLUSTER_QUICK:%=tests/cluster/test_%.py) \
  tests/batches/test_lines.py tests/grammar/test_calls.py tests/grammar/test_reasoning.py \
  tests/engine/test_kv_disk_files.py tests/loadtests/test_load_parts.py \
  tests/native/test_pool.py tests/native/test_stub.py tests/packaging/test_makefile.py tests/packaging/test_docs.py

quick: setup
	@$(PY) -m pytest -p testing.quick -p no:schemathesis -p no:locust -n 2 --dist loadfile --no-loadscope-reorder $(QUICK) $(ARGS)

# Three processes, a file at a time: on two cores one of them waits for servers while the others compute.
# Bytecode is kept, or each process that a test starts compiles all modules.
WORKERS ?= 3

test: setup $(VENV)/.train
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -p no:schemathesis -p no:locust -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Small shapes: the interpreter computes an instruction at a time. Processes of their own, as Triton reads the variable
# when it is imported.
TRITON := 3.8.0
KERNELS := tests/gpu/test_kernels.py tests/gpu/test_latent_kernels.py tests/gpu/test_training_kernels.py \
  tests/gpu/test_experts_handshake_kernels.py tests/gpu/test_kv_disk.py::test_planes_of_the_kernels_states_are_the_slots \
  tests/gpu/test_delta_kernels.py 'tests/gpu/test_delta.py::test_kernels_give_the_tokens_of_transformers[qwen3_next-drafts]' \
  tests/gpu/test_fused.py::test_of_equal_experts_the_lower_ones_are_chosen tests/gpu/test_fused.py::test_nan_routes_within_range \
  $(foreach test,a_nan_stays_in_its_row of_any_shape_limit_and_alpha,tests/gpu/test_experts_biased.py::test_$(test)) \
  $(foreach adapters,0 1,'tests/gpu/test_experts_kernels.py::test_weights_are_read_once_per_expert_whatever_the_number_of_adapters[$(adapters)]')
COMPILED := $(foreach name,fused kernels delta_kernels latent_kernels experts_kernels experts_tiled experts_index,tests/gpu/test_$(name).py)

test-kernels: setup $(VENV)/.triton
	@TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/triton $(PY) -m pytest -p no:schemathesis -p no:locust -n 2 $(KERNELS) $(ARGS)
	@PYTHONPATH=$(VENV)/triton $(PY) -m testing.compiled $(COMPILED)

test-gpu: setup
	@$(PY) -m benchmarks.gpu.tests $(ARGS)

test-clients: setup $(VENV)/.clients
	@KTSERVE_TEST_CLIENTS=1 $(PY) -m pytest tests/clients tests/tuning/test_tinker.py $(ARGS)

test-ray: setup $(VENV)/.ray
	@KTSERVE_TEST_RAY=1 $(PY) -m pytest tests/cluster $(ARGS)

wheel: $(VENV)/.packages
	@$(PIP) wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

test-wheel: setup
	@KTSERVE_TEST_WHEEL=1 $(PY) -m pytest -p no:schemathesis -p no:locust tests/packaging/test_installed.py $(ARGS)

lint: setup
	@$(VENV)/bin/ruff check $(SOURCES)
	@$(VENV)/bin/ruff format --check --quiet $(SOURCES)
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo 2>/dev/null || $(VENV)/bin/lint-imports
	@git ls-files 'native/*.cpp' 'native/*.hpp' 'engine/*.cu' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

format: setup
	@$(VENV)/bin/ruff check --fix --quiet $(SOURCES)
	@$(VENV)/bin/ruff format --quiet $(SOURCES)
	@git ls-files 'native/*.cpp' 'native/*.hpp' 'engine/*.cu' | xargs -r $(VENV)/bin/clang-format -i

load: setup
	@$(PY) -m ktserve loadtests $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(UI),--ui) $(ARGS)

soak: setup
	@$(PY) -m ktserve loadtests --scenario soak --duration 120 --max-tokens 64 $(ARGS) -- --check-integrity --max-adapter-slots 4

chaos: setup
	@$(PY) -m loadtests.chaos.run $(ARGS)

fuzz: setup
	@$(PY) -m testing.fuzz.run $(ARGS)

bench-cpu: setup
	@$(PY) -m benchmarks.cpu.run --models '$(or $(MODELS),$(error MODELS=DIR: a folder with 40 GB to spare))' $(if $(LLAMA),--llama '$(LLAMA)') $(if $(OUT),--out '$(OUT)') $(ARGS)
	@$(PY) -m benchmarks.report.pages

# Stops at the first report; the tiles of AMX are emulated, so every kernel runs on any machine with AVX2.
sanitize: $(VENV)/.packages
	@for preset in plain asan tsan; do \
	  echo "native tests, $$preset ..."; \
	  $(VENV)/bin/cmake --preset $$preset -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja >/dev/null \
	    && $(VENV)/bin/cmake --build --preset $$preset >/dev/null \
	    && $(VENV)/bin/ctest --preset $$preset || exit 1; \
	done

bench-gpu: setup
	@$(PY) -m benchmarks.gpu.run $(if $(LLAMA),--llama '$(LLAMA)') $(if $(MODELS),--models '$(MODELS)') $(ARGS)

clean:
	rm -rf $(VENV) build native/*.so

# ---- set-up: each stamp is made once and again only when what it stands on has changed

NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt) CMakeLists.txt

GPU := $(if $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep '^GPU'),$(VENV)/.gpu)

setup: $(VENV)/.packages $(VENV)/.kt $(VENV)/.native $(VENV)/.compiled $(GPU)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v < (3, 15) else "ktserve needs Python 3.10 to 3.14, this is %d.%d: make PYTHON=python3.11 ..." % v[:2])'
	@echo 'setting up $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.packages: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'installing packages (a few minutes the first time) ...'
	@$(PIP) install -qq --constraint constraints.txt scikit-build-core nanobind cmake ninja torch
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --config-settings=wheel.cmake=false --editable '.[dev]'
	@touch $@

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/.packages
	@echo 'installing what training needs ...'
	@$(PIP) install -qq --constraint constraints.txt $$($(PY) -m testing.extra train)
	@touch $@

# In an environment of its own: it pins other versions of packages than ours.
AIDER := 0.86.2
$(VENV)/.clients: pyproject.toml constraints.txt tests/clients/node/package.json | $(VENV)/.packages
	@echo 'installing clients ...'
	@$(PIP) install -qq --constraint constraints.txt $$($(PY) -m testing.extra clients)
	@command -v npm >/dev/null && (cd tests/clients/node && npm install --no-package-lock --no-audit --no-fund --silent) \
	  || echo 'npm is not here or failed: the clients of JavaScript will be skipped'
	@$(PYTHON) -m venv $(VENV)/aider && $(VENV)/aider/bin/python -m pip install -qq --disable-pip-version-check \
	  aider-chat==$(AIDER) || echo 'aider is not available for this Python: it will be skipped'
	@touch $@

$(VENV)/.ray: pyproject.toml constraints.txt | $(VENV)/.packages
	@echo 'installing Ray ...'
	@$(PIP) install -qq --constraint constraints.txt $$($(PY) -m testing.extra ray)
	@touch $@

# kt_kernel pins another torch in its metadata but does not use it; its wheel needs Linux x86-64 with glibc 2.35.
$(VENV)/.kt: constraints.txt | $(VENV)/.packages
	@$(PIP) install -qq --no-deps --constraint constraints.txt kt-kernel 2>$(VENV)/kt.log \
	  || echo 'kt_kernel is not available here (see $(VENV)/kt.log); the kt expert backend will be off'
	@touch $@

# Beside the environment, not in it: torch for CPUs comes without Triton and behaves otherwise where it finds it.
$(VENV)/.triton: Makefile | $(VENV)/.packages
	@echo 'installing the interpreter of Triton ...'
	@$(PIP) install -qq --no-deps --upgrade --target $(VENV)/triton triton==$(TRITON)
	@touch $@

# flashinfer's metadata asks for packages of other kernels than attention's: a gigabyte that is not used here.
$(VENV)/.gpu: pyproject.toml constraints.txt | $(VENV)/.packages
	@echo 'an NVIDIA GPU is here: installing flashinfer, attention will run on the GPU ...'
	@$(PIP) install -qq --no-deps --constraint constraints.txt flashinfer-python apache-tvm-ffi 2>$(VENV)/gpu.log \
	  && $(PIP) install -qq --constraint constraints.txt click einops ninja nvidia-ml-py packaging requests tabulate tqdm 2>>$(VENV)/gpu.log \
	  || echo 'flashinfer is not available here (see $(VENV)/gpu.log); the GPU will not be used'
	@$(PY) -c 'import torch; torch.cuda.is_available() or print("this torch cannot use the GPU: a CPU build, or a driver too old")'
	@touch $@

# What is installed finds each module where it was at that time: files that came, went or moved since are a reason to
# install again.
MODULES := $(shell find ktserve api engine scheduler native rules training loadtests demo cluster -name '*.py' \
  | LC_ALL=C sort | cksum | cut -d' ' -f1)

# Compiled once and not by each process, of which a server has three, where PYTHONDONTWRITEBYTECODE is set (images).
SERVED := ktserve api engine scheduler native rules training demo
$(VENV)/.compiled: $(shell find $(SERVED) -name '*.py') | $(VENV)/bin/python
	@$(PY) -m compileall -q $(SERVED)
	@touch $@

$(VENV)/.modules-$(MODULES): | $(VENV)/bin/python
	@rm -f $(VENV)/.modules-*
	@touch $@

$(VENV)/.native: $(NATIVE) $(VENV)/.packages $(VENV)/.modules-$(MODULES)
	@echo 'building the CPU kernels ...'
	@$(PIP) install -qq --no-deps --no-build-isolation --editable . >$(VENV)/native.log 2>&1 \
	  || echo 'the CPU kernels could not be built (see $(VENV)/native.log): torch computes instead, much slower'
	@touch $@
