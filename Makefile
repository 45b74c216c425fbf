# Each target makes its own virtual environment, from nothing, on a machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ROOTS := cluster:workers:kernels:proto

export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-gpu lint proto proto-check clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/gemray demo

test: $(INSTALLED)
	$(BIN)/python -m pytest tests --ignore=tests/gpu -n 2 --dist loadfile

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu

lint: $(INSTALLED) proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(ROOTS) $(BIN)/lint-imports

# The generated modules are committed; `proto-check` fails when they are not what `proto` would write.
proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/gemray/v1/*.proto

proto-check: $(INSTALLED)
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code
	rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(VENV)/proto-check --pyi_out=$(VENV)/proto-check --grpc_python_out=$(VENV)/proto-check proto/gemray/v1/*.proto
	for f in $(VENV)/proto-check/gemray/v1/*; do cmp $$f proto/gemray/v1/$$(basename $$f) || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
