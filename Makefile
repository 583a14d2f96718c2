# Needs a network and Python 3.11 or later; everything else is installed into .venv.
PYTHON ?= python3.14 python3.13 python3.12 python3.11 python3
TESTED := Python 3.11 to 3.14
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
PYTEST := -m pytest --numprocesses 2 --dist loadfile
TEACHER := teachers/BreakoutNoFrameskip-v4-ppo-seed1
# start-e: the teacher explores little, so that its 20,000 steps reach all of the game.
# learning rates: 2,000 updates learn too little at the default. Online, 1e-3 would change the policy too fast.
# distill-coefficient: 6 is the authors' value.
# total-timesteps: λ is annealed after ten episodes, which are about 8,000 steps of Breakout.
DEMO := --env-id BreakoutNoFrameskip-v4 --teacher-policy-hf-repo $(TEACHER) --n-step 3 --num-envs 4 \
	--learning-rate 1e-3 --online-learning-rate 1e-4 --final-learning-rate 1e-5 --warmup-updates 300 \
	--distill-coefficient 6 --start-e 0.1 --teacher-steps 20000 --offline-steps 2000 --total-timesteps 10000 \
	--learning-starts 1000 --train-frequency 16 --buffer-size 10000 --teacher-eval-episodes 20 --eval-episodes 20

.PHONY: help demo demo-jax test test-fast test-gpu test-newest test-lowest lint benchmark benchmark-gpu \
	docs docs-serve requirements clean

help:
	@echo "make demo           train a student on Breakout from a PPO agent in teachers/, 4 to 15 minutes on 2 cores"
	@echo "make demo-jax       the same in JAX"
	@echo "make test           run the tests, 4 minutes or more on 2 cores"
	@echo "make test-fast      run those of networks, losses, replay buffer, environments and learning"
	@echo "make test-gpu       run the tests that need an NVIDIA GPU"
	@echo "make test-newest    run the tests with the newest versions of all packages"
	@echo "make test-lowest    run the tests with the lowest versions that pyproject.toml allows, on Python 3.11"
	@echo "make lint           run ruff check and ruff format --check"
	@echo "make benchmark      measure the speed of both scripts on Pong, and print the hours of a default run"
	@echo "make benchmark-gpu  run the tests that need an NVIDIA GPU, then measure the speed of both scripts on it"
	@echo "make docs           build the documentation in site/"
	@echo "make docs-serve     serve the documentation at http://127.0.0.1:8000 and rebuild it after each change"
	@echo "make requirements   update the pinned versions in requirements/"
	@echo "make clean          delete .venv and all that was built"

demo: $(VENV)/atari
	$(RUN) cleanrl/qdagger_dqn_atari_impalacnn.py $(DEMO)

demo-jax: $(VENV)/jax
	$(RUN) cleanrl/qdagger_dqn_atari_jax_impalacnn.py $(DEMO)

# Two processes, each on half of the cores; by file, since the tests of a file share runs.
test: $(VENV)/test
	$(RUN) $(PYTEST)

# The tests of networks, losses, replay buffer, environments, schedules and learning, in PyTorch and JAX.
FAST := atari learning libraries replay schedules update jax
test-fast: $(VENV)/test
	$(RUN) $(PYTEST) $(FAST:%=tests/test_%.py)

# Both install into a fresh environment, and PyTorch with CUDA, which takes 8 GB on the disk.
EVERYTHING := -e '.[atari,jax,plot,test]'
test-newest:
	rm -rf .venv-newest
	$(MAKE) VENV=.venv-newest .venv-newest/bin/python
	.venv-newest/bin/python -m pip install --quiet $(EVERYTHING)
	.venv-newest/bin/python $(PYTEST)

test-lowest: PYTHON := python3.11
test-lowest:
	rm -rf .venv-lowest
	$(MAKE) VENV=.venv-lowest PYTHON=$(PYTHON) .venv-lowest/bin/python
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct $(EVERYTHING)
	.venv-lowest/bin/python $(PYTEST)

# These two install nothing, as the pinned versions of JAX can't use a GPU. They run `python`, or PYTHON if it is set.
test-gpu:
	QDAGGER_TEST_GPU=1 $${PYTHON:-python} -m pytest -m gpu tests/test_gpu.py

benchmark-gpu:
	benchmark/gpu.sh

lint: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

benchmark: $(VENV)/test
	$(RUN) benchmark/throughput.py
	$(RUN) benchmark/throughput.py --backend jax

# Otherwise mkdocs-material advertises its successor in twenty lines.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/docs
	$(RUN) -m mkdocs build --strict

docs-serve: $(VENV)/docs
	$(RUN) -m mkdocs serve

# Make the environment again if it is incomplete ("activate" is written last), if its Python is gone, as after an upgrade
# of the system, or if it has no pip.
ifneq ($(shell test -e $(VENV)/bin/activate && $(RUN) -c 'import pip' 2>&1 && echo complete),complete)
.PHONY: $(RUN)
endif

$(RUN):
	@requirements/venv.sh $(VENV) $(PYTHON)

# The file $(VENV)/% records what is installed; its rule runs again when the pins change.
$(VENV)/%: requirements/requirements-%.txt pyproject.toml $(RUN)
	@echo "installing $< into $(VENV)"
	@$(PIP) install -r $< || ! echo "error: installation with `$(RUN) --version` failed, see above; $(TESTED) are tested" >&2
	@touch $@

# Pin the newest versions for the extras in pyproject.toml, without addresses and without the build label of PyTorch.
# The last line installs the project itself.
COMPILE := -m piptools compile --quiet --upgrade --strip-extras --no-header --no-annotate --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host --constraint requirements/constraints.in pyproject.toml
requirements: $(VENV)/test
	$(PIP) install pip-tools
	$(RUN) $(COMPILE) --extra atari --output-file requirements/requirements-atari.txt
	$(RUN) $(COMPILE) --extra jax --output-file requirements/requirements-jax.txt
	$(RUN) $(COMPILE) --extra atari,jax,plot,test --output-file requirements/requirements-test.txt
	$(RUN) $(COMPILE) --constraint requirements/requirements-test.txt \
		--extra docs --output-file requirements/requirements-docs.txt
	for file in requirements/requirements-*.txt; do \
		sed -e 's/+cpu$$//' -e '/^#/d' -e '/^$$/d' $$file > $$file.new; \
		echo "-e ." >> $$file.new; \
		mv $$file.new $$file; \
	done

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest build site *.egg-info
