# Two commands do everything on a fresh machine: `make train` and `make test`. `make bench` guards the speed (3 minutes),
# `make coverage` and `make test-wheel` look at the tests and at what is published.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    ?= runs/doom_basic
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
ALL    := $(VENV)/.installed-all

.PHONY: train test test-slow coverage test-wheel bench install install-dev install-all lint clean

train: install
	$(BIN)/pronghorn train doom:basic --run-dir $(RUN) --resume --eval.until-return 0.70 --eval.episodes 100
	$(BIN)/pronghorn eval $(RUN) --episodes 100 --random
	$(BIN)/pronghorn record $(RUN) --out $(RUN)/videos/agent.mp4
	$(BIN)/pronghorn report $(RUN) --out $(RUN)/report.html --curve $(RUN)/curve.png
	@echo "video    $(RUN)/videos/agent.mp4"
	@echo "next:    $(BIN)/pronghorn watch $(RUN)"
	@echo "         $(BIN)/pronghorn train doom:defend_the_center --minutes 60"
	@echo "         $(BIN)/pronghorn train gym:CartPole-v1 --minutes 5"

test: install-dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-slow: install-all
	$(BIN)/python -m pytest -m slow

# The same tests, slower: every line that ran is counted, in workers and other processes too.
coverage: install-dev
	$(BIN)/python -m pytest --cov --cov-report=term

# What is published: the wheel, installed into an environment of its own and tested there.
test-wheel: install-dev
	$(BIN)/python tests/wheel.py

bench: install
	$(BIN)/python benchmarks/guard.py

lint: install-dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

install: $(STAMP)
install-dev: $(DEV)
install-all: $(ALL)

# torch is installed first and by its pinned version, so that no later package pulls in another build of it.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[doom,atari,pettingzoo]"
	touch $@

# what the tests need besides; EnvPool, which has no wheels everywhere, is most of it
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(ALL): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt swig
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet -c constraints.txt -e ".[doom,atari,pettingzoo,minigrid,box2d,mujoco,envpool,cluster,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
