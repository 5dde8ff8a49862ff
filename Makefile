# make demo: the main job, offline.  make test, make lint, make compile: what every change must pass.  Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the command imports when it starts: compiled at once, where an environment forbids it later. All of torch would take minutes.
STARTS := typer rich pydantic annotated_types typing_inspection markdown_it mdurl filelock platformdirs blake3

.PHONY: demo test lint compile format docs docs-pages clean faults faults-files faults-network faults-documents faults-long

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kernelzoo needs Python 3.11 or newer; make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,demo]'
	-$(BIN)/python -m compileall -q zoo weights convert $(addprefix $(VENV)/lib/python3*/site-packages/,$(STARTS))
	touch $@

demo: $(BIN)/.installed
	$(BIN)/zoo demo

# With bytecode kept, whatever the environment says of it: the tests start Python by the hundred.
test: $(BIN)/.installed
	-test -d tests/__pycache__ || PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -qq --collect-only >/dev/null  # or three workers compile the same at once
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Faults by the thousand, with a report in docs/notes/faults.md; interrupted, each goes on where it stopped.
faults: faults-files faults-network faults-documents faults-long

faults-network: $(BIN)/.installed
	PYTHONPATH=. $(BIN)/python tests/network_faults.py --count 1000 --docs docs/notes/faults.md

# Twenty thousand mutants of each document that is written and read again, about twenty minutes on one core.
faults-documents: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/document_faults.py --count 20000 --docs docs/notes/faults.md

# Twenty thousand damaged files a reader, about half an hour on one core.
faults-files: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/convert/faults_files.py --report docs/notes/faults.md

# Fifty processes on one cache, a hundred kills, a thousand rounds of gc and of round trips, disks that fail at every call: hours.
faults-long: $(BIN)/.installed
	$(BIN)/python tests/long_runs.py --docs docs/notes/faults.md

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# All kernels for a GPU that isn't there: Triton's interpreter, which the tests use, takes what its compiler refuses.
compile: $(BIN)/.installed
	PYTHONPATH=. $(BIN)/python tests/compile_kernels.py

# The documentation as HTML in build/docs; a warning is an error, as in the tests.
docs: $(BIN)/.installed
	$(BIN)/python docs/generate.py --check
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo build/docs/index.html

# The pages that follow from the registries, the command and the record of measurements.
docs-pages: $(BIN)/.installed
	$(BIN)/python docs/generate.py

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis .faults .faults-files.json demo.png
