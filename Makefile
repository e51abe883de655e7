# Two commands: `make demo` compiles a model and chats with it, `make test` checks everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := artifacts/smollm2-135m-cpu
PROMPT ?= Why is the sky blue? Answer in one sentence.

.PHONY: demo test test-gpu lint install-demo install-test clean

demo: install-demo
	$(BIN)/tapeout compile specs/smollm2-135m-cpu.yaml -o $(DEMO) --force
	$(BIN)/tapeout run $(DEMO) --chat --prompt "$(PROMPT)"

test: install-test lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# on a machine with an NVIDIA GPU: kernels, whole models, compute-sanitizer; tests skip what they do not find
test-gpu: install-test $(VENV)/.gpu
	$(BIN)/python -m pytest -m gpu tests/gpu

# pyright follows neither editable installs nor links to folders, so it reads a copy laid out as the packages are
lint: install-test
	rm -rf build/types && mkdir -p build/types/tapeout && cp -R compiler passes runtime specs build/types/tapeout
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tapeout needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[compiler]'
	touch $@

$(VENV)/.test: pyproject.toml tests/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[compiler,cuda,gpu,ray,verify,dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.gpu: pyproject.toml | $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[compiler,gpu,cuda]'
	touch $@

install-demo: $(VENV)/.demo
install-test: $(VENV)/.test

clean:
	rm -rf $(VENV) build artifacts/smollm2-135m-cpu *.egg-info
