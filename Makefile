# Two commands do it all: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test browser check bench paper studies clean

demo: $(READY)  ## five methods on one small task: loss against bytes
	$(BIN)/overtone demo

test: $(READY)  ## all tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist worksteal

browser:  ## Chromium for the tests of the page, from Debian's packages; without one they are skipped
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## speed of the codec and of the loop, against the published path, memory and torch's own
	$(BIN)/overtone bench codec
	$(BIN)/overtone bench train

paper: $(READY)  ## the paper's table in miniature: about an hour on two cores; goes on where it was cut off
	$(BIN)/python benchmarks/paper.py

studies: $(READY)  ## the small studies behind docs/log.md; TEXT=file
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/studies.py --text $(TEXT)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
