# Needs Python 3.11 or newer and a network; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TEACHER := teachers/PongNoFrameskip-v4-dqn_atari-seed1
TEACHER_JAX := teachers/PongNoFrameskip-v4-dqn_atari_jax-seed1
# A larger learning rate while the teacher's data lasts: it is not for long. Of more than four games few would end.
DEMO := --env-id PongNoFrameskip-v4 --learning-rate 1e-3 --online-learning-rate 1e-4 --warmup-updates 300 \
	--num-envs 4 --teacher-steps 20000 --total-timesteps 16000 --learning-starts 1000 --buffer-size 16000 \
	--teacher-eval-episodes 10 --eval-episodes 10 --save-model

.PHONY: help demo demo-jax test test-gpu test-slurm torture torture-jax lint benchmark benchmark-gpu docs docs-serve requirements clean

help:
	@echo "make demo         QDagger on Pong from the embedded teacher, 5 to 13 minutes on 2 cores"
	@echo "make demo-jax     the same in JAX, 18 minutes"
	@echo "make test         the test suite, 8 to 10 minutes on 2 cores"
	@echo "make test-gpu     the tests that need an NVIDIA GPU"
	@echo "make test-slurm   the benchmark runner on a running Slurm, 7 minutes"
	@echo "make torture      kills and resumes a run 100 times"
	@echo "make torture-jax  the same in JAX"
	@echo "make lint         ruff check and ruff format --check"
	@echo "make benchmark    speed against the plain formulation"
	@echo "make benchmark-gpu  tests and speed on an NVIDIA GPU, as a Markdown file"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make docs-serve   the same at http://127.0.0.1:8000, anew after every change"

demo: $(VENV)/atari
	$(RUN) cleanrl/qdagger_dqn_atari_impalacnn.py --teacher-policy-hf-repo $(TEACHER) $(DEMO) --offline-steps 2000

# JAX's updates take three times as long on a CPU: half as many offline, in which the teaching has the authors' weight.
# After so few, 3-step returns had got further (one seed).
demo-jax: $(VENV)/jax
	$(RUN) cleanrl/qdagger_dqn_atari_jax_impalacnn.py --teacher-policy-hf-repo $(TEACHER_JAX) $(DEMO) \
		--offline-steps 1000 --distill-coefficient 3 --n-step 3

# Two at a time, each on half of the cores; by file, whose tests share runs that take long to make.
test: $(VENV)/test
	$(RUN) -m pytest --numprocesses 2 --dist loadfile

# Needs an NVIDIA GPU, and PyTorch and JAX that can use it.
test-gpu: $(VENV)/test
	QDAGGER_TEST_GPU=1 $(RUN) -m pytest -m gpu tests/test_gpu.py

# A Slurm of one node for it, where the means to start one lie beside this directory.
test-slurm: $(VENV)/test
	sinfo >/dev/null 2>&1 || test ! -e ../shared/slurm_single_node.sh || bash ../shared/slurm_single_node.sh start
	$(RUN) -m pytest -m slurm tests/test_slurm.py

torture: $(VENV)/test
	$(RUN) tests/torture.py --kills 100

torture-jax: $(VENV)/test
	$(RUN) tests/torture.py --kills 100 --backend jax

lint: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

benchmark: $(VENV)/test
	$(RUN) benchmark/throughput.py --teacher $(TEACHER)
	$(RUN) benchmark/throughput.py --teacher $(TEACHER) --backend jax

benchmark-gpu: $(VENV)/test
	PYTHON=$(RUN) benchmark/gpu.sh

docs: $(VENV)/docs
	$(RUN) -m mkdocs build --strict

docs-serve: $(VENV)/docs
	$(RUN) -m mkdocs serve

# The installed set is remembered in a file of its name, so that it is done again when the pins change.
$(VENV)/%: requirements/requirements-%.txt pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $<
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# Pins for pyproject.toml's extras: the newest versions that fit, without addresses and without torch's build label.
COMPILE := -m piptools compile --quiet --upgrade --strip-extras --no-header --no-annotate --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host --constraint requirements/constraints.in pyproject.toml
requirements: $(VENV)/test
	$(RUN) -m pip install --quiet pip-tools
	$(RUN) $(COMPILE) --extra atari,video,track --output-file requirements/requirements-atari.txt
	$(RUN) $(COMPILE) --extra jax,track --output-file requirements/requirements-jax.txt
	$(RUN) $(COMPILE) --extra atari,jax,video,track,plot,slurm,test --output-file requirements/requirements-test.txt
	$(RUN) $(COMPILE) --constraint requirements/requirements-test.txt \
		--extra docs --output-file requirements/requirements-docs.txt
	sed -i -e 's/+cpu$$//' -e '/^#/d' requirements/requirements-*.txt

clean:
	rm -rf $(VENV) build site *.egg-info
