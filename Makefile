# Needs make and a Python >= 3.11 with venv. An active conda environment is used as it is; otherwise .venv is made.
#
#   make run          install, fetch the model, run 00 and 01 on this machine, print the table and the report's path
#   make lab          JupyterLab on notebooks/
#   make test         everything that proves the checkout right
#   make test-light   the base install and the control plane alone; PYTHON=python3.12 and 3.13 are supported too
#   make proof        what is too long for the tests: peers, coverage, fifty faults, a thousand runs; published
#   make clean        environments and caches; outputs/ stays
#
#   TORCH_INDEX=URL   take torch from that index, e.g. one that has CPU wheels

PYTHON ?= python3
TIER ?= laptop
MODEL ?= smollm2-135m
LAB_ARGS ?=
PARTS ?=

export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifdef CONDA_PREFIX
ENV := $(CONDA_PREFIX)
else
ENV := .venv
endif
BIN := $(ENV)/bin

# A stamp lives in the environment that it speaks of and names the checkout installed there: two checkouts may share one.
CHECKOUT := $(firstword $(shell printf %s "$(CURDIR)" | cksum))
STAMP := $(ENV)/.p99lab-$(CHECKOUT)
PINS := pyproject.toml constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt
NEW_STAMP = find $(ENV) -maxdepth 1 -name '.p99lab-*' ! -name '.p99lab-$(CHECKOUT)-*' -exec rm -f {} + && touch

.PHONY: help run lab test test-light proof clean
help:
	@sed -n '/^#   /s/^#   //p' Makefile

run: $(STAMP)-run
	$(BIN)/p99lab models fetch $(MODEL)
	$(BIN)/p99lab run 00 --tier $(TIER)
	$(BIN)/p99lab run 01 --tier $(TIER)

lab: $(STAMP)-kernel
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks

test: $(STAMP)-test
	$(BIN)/p99lab models fetch $(MODEL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb
	$(BIN)/python -m pytest -m "not gpu"

proof: $(STAMP)-test
	$(BIN)/p99lab models fetch $(MODEL)
	$(BIN)/p99lab proof $(PARTS)

$(STAMP)-run: $(PINS) | $(BIN)/pip
	$(TORCH)
	$(INSTALL) --editable '.[engine,lab,serve]'
	@$(NEW_STAMP) $@

$(STAMP)-test: $(PINS) | $(BIN)/pip
	$(TORCH)
	$(INSTALL) --editable '.[engine,lab,serve,dev]'
	@$(NEW_STAMP) $(STAMP)-run $@

$(STAMP)-kernel: $(STAMP)-run
	$(BIN)/python -m ipykernel install --sys-prefix --name p99lab --display-name p99lab
	@touch $@

# Only torch comes from TORCH_INDEX; what it needs is resolved with everything else.
TORCH = $(if $(TORCH_INDEX),$(INSTALL) --no-deps --index-url $(TORCH_INDEX) torch)

ifdef CONDA_PREFIX
$(BIN)/pip:
	@echo 'the active conda environment has no pip: conda install python=3.12 pip' >&2; exit 1
endif

# pip is the last thing that venv writes: an interrupted attempt is made again.
.venv/bin/pip:
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv .venv

NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit("p99lab needs Python 3.11 or newer, this is " + \
	sys.version.split()[0] + ": make PYTHON=python3.11 ...")

# --- the base install, in an environment of its own per Python version ------------------------------------------------

LIGHT := .venv-light-$(or $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'),none)

test-light: $(LIGHT)/.p99lab-light
	$(LIGHT)/bin/python -m pytest -m light $$(grep -rl --include='test_*.py' 'mark\.light' tests)

.venv-light-%/.p99lab-light: $(PINS)
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest hypothesis
	@touch $@

clean:
	rm -rf .venv .venv-light-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(ENV)/.p99lab-*
	find lib tests -name __pycache__ -type d -prune -exec rm -rf {} +
