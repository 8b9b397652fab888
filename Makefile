# `make help` lists what there is. Everything is installed into VENV, which is made if it is not there.
# An environment of yours that has torch already may be given: `make demo VENV=path`. Nothing in it is replaced.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FEW := $(VENV)/.overtone-demo
ALL := $(VENV)/.overtone-dev
PINS := $(VENV)/.overtone-pins
OLDEST ?= .venv-oldest
CORE := golden vectors equivalence transcriptions every_method replica_edge_cases codec kernels dct layout wire wire_spec summed \
	fingerprint leaving_out gloo simulate config cli command_lines
, := ,

.PHONY: help demo format check quick test package oldest browser bench paper exchange frontier chaos studies clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(FEW)  ## five methods on one small task: loss against bytes
	$(BIN)/overtone demo

format: $(ALL)  ## put every file into its form, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(ALL)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: $(ALL)  ## the fast tests, after every edit: all that are not marked slow
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --durations 5 --durations-min 2

test: $(ALL)  ## all tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist worksteal

package: $(ALL)  ## wheel and sdist, each installed and tried in an empty environment
	.ci/package $(BIN)/python

oldest: $(OLDEST)/.overtone-oldest  ## the core's tests on the oldest versions that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(CORE:%=tests/test_%.py)

browser:  ## Chromium for the tests of the page, from Debian's packages; without one they are skipped
	@.ci/browser

bench: $(ALL)  ## speed of the codec and of the loop, against the published path, memory and torch's own
	$(BIN)/overtone bench codec
	$(BIN)/overtone bench train

paper: $(ALL)  ## the paper's table in miniature: about an hour on two cores; goes on where it was cut off
	$(BIN)/python benchmarks/paper.py $(if $(DATA),--data $(DATA))

exchange: $(ALL)  ## sharded against gathered, and delays: bytes and loss, three seeds; goes on where it was cut off
	$(BIN)/python benchmarks/exchange.py $(if $(DATA),--data $(DATA))

frontier: $(ALL)  ## loss against bytes on models of 0.4 to 10 M parameters: ten hours on two cores; goes on where it was cut off
	PYTHONPATH=benchmarks $(BIN)/python -m frontier $(if $(DATA),--data $(DATA))

chaos: $(ALL)  ## a run in a store under disturbances: kill -9, frozen processes, newcomers, a failing store
	PYTHONPATH=benchmarks $(BIN)/python -m chaos

studies: $(ALL)  ## the small studies behind docs/log.md; TEXT=file
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/studies.py --text $(TEXT)

clean:  ## remove environments, caches and builds
	rm -rf .venv $(OLDEST) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The pins hold where make itself made the environment. Another one keeps what it has, and gets what is missing.
$(FEW): pyproject.toml constraints.txt
	$(call install,cli$(,)fast)
	touch $@

$(ALL): pyproject.toml constraints.txt
	$(call install,dev)
	touch $@ $(FEW)

define install
test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && touch $(PINS); }
test ! -e $(VENV)/.ready || touch $(PINS)  # as earlier Makefiles left it
$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$$(test ! -e $(PINS) || echo -c constraints.txt) -e ".[$(1)]"
endef

$(OLDEST)/.overtone-oldest: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e ".[bench]" \
		safetensors pytest pytest-xdist pytest-timeout hypothesis
	touch $@
