# Needs Python 3.11 or newer and a network; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TEACHER := teachers/PongNoFrameskip-v4-dqn_atari-seed1
TEACHER_JAX := teachers/PongNoFrameskip-v4-dqn_atari_jax-seed1
# Ten times the default learning rate: 4,000 updates are few. Half the games: in so few steps, more would not end.
DEMO := --env-id PongNoFrameskip-v4 --learning-rate 1e-3 --num-envs 8 --teacher-steps 20000 \
	--offline-steps 4000 --offline-eval-frequency 2000 \
	--total-timesteps 10000 --learning-starts 1000 --buffer-size 20000 \
	--teacher-eval-episodes 10 --eval-episodes 10 --save-model

.PHONY: help demo demo-jax test torture torture-jax lint benchmark requirements clean

help:
	@echo "make demo         QDagger on Pong from the embedded teacher, 9 to 13 minutes on 2 cores"
	@echo "make demo-jax     the same in JAX, 28 minutes"
	@echo "make test         the test suite, 8 to 10 minutes on 2 cores"
	@echo "make torture      kills and resumes a run 25 times, about 3 minutes"
	@echo "make torture-jax  the same in JAX"
	@echo "make lint         ruff check and ruff format --check"
	@echo "make benchmark    speed against the plain formulation"

demo: $(VENV)/atari
	$(RUN) cleanrl/qdagger_dqn_atari_impalacnn.py --teacher-policy-hf-repo $(TEACHER) $(DEMO)

demo-jax: $(VENV)/jax
	$(RUN) cleanrl/qdagger_dqn_atari_jax_impalacnn.py --teacher-policy-hf-repo $(TEACHER_JAX) $(DEMO) --warmup-updates 300

# Two at a time, each on half of the cores; by file, whose tests share runs that take long to make.
test: $(VENV)/test
	$(RUN) -m pytest --numprocesses 2 --dist loadfile

torture: $(VENV)/test
	$(RUN) tests/torture.py --kills 25

torture-jax: $(VENV)/test
	$(RUN) tests/torture.py --kills 25 --backend jax

lint: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

benchmark: $(VENV)/test
	$(RUN) benchmark/throughput.py --teacher $(TEACHER)

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
	$(RUN) $(COMPILE) --extra atari,torch,video,track --output-file requirements/requirements-atari.txt
	$(RUN) $(COMPILE) --extra atari,jax,track --output-file requirements/requirements-jax.txt
	$(RUN) $(COMPILE) --extra atari,torch,jax,video,track,plot,test --output-file requirements/requirements-test.txt
	sed -i -e 's/+cpu$$//' -e '/^#/d' requirements/requirements-*.txt

clean:
	rm -rf $(VENV) build *.egg-info
