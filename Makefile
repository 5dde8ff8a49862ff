# make demo: the main job, offline.  make test, make lint: what every change must pass.  Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean faults faults-files

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kernelzoo needs Python 3.11 or newer; make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,demo]'
	touch $@

demo: $(BIN)/.installed
	$(BIN)/zoo demo

test: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Twenty thousand damaged files a reader, about half an hour on one core; an interrupted run goes on where it was. `make faults` has all faults.
faults: faults-files

faults-files: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/convert/faults_files.py --report docs/faults.md

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .faults .faults-files.json demo.png
