# Each target makes its own virtual environment, from nothing, on a machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ROOTS := cluster:workers:kernels:proto
# The generator of proto/ asks for the oldest protobuf that gemray takes, so it lives apart; it needs Python 3.11 or 3.12.
PROTO_PYTHON ?= $(PYTHON)
PROTO_VENV := $(VENV)-proto
PROTO_INSTALLED := $(PROTO_VENV)/.installed
LOWEST := $(VENV)-lowest
LOWEST_INSTALLED := $(LOWEST)/.installed
PROTOC := $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto

export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# mypy 2 checks in so many processes, of 1.6 GB each; earlier ones in one.
export MYPY_NUM_WORKERS ?= 2
# Tests start hundreds of processes and import in several at once; where nothing may be kept, as images of Python have it,
# each compiles the same modules for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo openai test test-lowest test-gpu lint proto proto-check lock clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@

$(PROTO_INSTALLED): proto/generator.txt proto/lowest.txt
	$(PROTO_PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: -r proto/generator.txt
	touch $@

demo: $(INSTALLED)
	$(BIN)/gemray demo

# The demo's model with OpenAI's HTTP API at http://127.0.0.1:8000/v1, until Ctrl-C.
openai: $(INSTALLED)
	$(BIN)/gemray demo --openai

# Twice as many as two cores, as some wait for servers. Four take 14 GB of memory.
TEST_WORKERS ?= 4
test: $(INSTALLED)
	$(BIN)/python -m pytest tests --ignore=tests/gpu -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The service as clients call it, over the oldest gRPC and protobuf: they lie before the environment's own.
$(LOWEST_INSTALLED): proto/lowest.txt $(INSTALLED)
	rm -rf $(LOWEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(LOWEST) -r proto/lowest.txt
	touch $@

test-lowest: $(LOWEST_INSTALLED)
	PYTHONPATH=$(LOWEST) $(BIN)/python -m pytest -q $(addprefix tests/cluster/server/test_,service_generate.py \
		service_bad_input.py server_life.py first_message.py answer_size.py)

# On two GPUs or more also the regression tests of TP 2; mixed traffic lasts TRAFFIC_SECONDS. Workers are as many as cores
# and the cards' memory have room for.
TRAFFIC_SECONDS ?= 600
GPU_TEST_WORKERS ?= auto
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu -n $(GPU_TEST_WORKERS) --dist load --maxschedchunk 1 \
		--traffic-seconds $(TRAFFIC_SECONDS)

lint: $(INSTALLED) proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(ROOTS) $(BIN)/lint-imports

# The generated modules and docs/api.md are committed; `proto-check` fails when they are not what `proto` would write, and
# imports the modules with the oldest packages that pyproject.toml allows and with the newest.
proto: $(INSTALLED) $(PROTO_INSTALLED)
	$(PROTOC) --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/gemray/v1/*.proto
	$(BIN)/python proto/api_doc.py > docs/api.md

proto-check: $(INSTALLED) $(PROTO_INSTALLED)
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code
	rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	$(PROTOC) --python_out=$(VENV)/proto-check --pyi_out=$(VENV)/proto-check --grpc_python_out=$(VENV)/proto-check proto/gemray/v1/*.proto
	$(BIN)/python proto/api_doc.py | cmp - docs/api.md
	for f in $(VENV)/proto-check/gemray/v1/*; do cmp $$f proto/gemray/v1/$$(basename $$f) || exit 1; done
	for bin in $(PROTO_VENV)/bin $(BIN); do \
		PYTHONPATH=proto $$bin/python -W error -c "import gemray.v1.generation_pb2_grpc" || exit 1; done

clean:
	rm -rf $(VENV) $(VENV)-uv $(PROTO_VENV) $(LOWEST) .pytest_cache .hypothesis .mypy_cache .ruff_cache

# What the image installs, to the hash; written anew when dependencies change. torch of PyPI is the CUDA build, and brings
# the triton that it was built with.
LOCK := helm/docker/requirements.lock
UV_VERSION := 0.13.9
lock:
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(VENV)-uv/bin/uv pip compile pyproject.toml helm/docker/requirements.in --extra gpu --extra cluster --extra tracing \
		--extra openai --constraint constraints.txt --python-version 3.12 --python-platform x86_64-manylinux_2_36 \
		--only-binary :all: --no-python-downloads --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file $(LOCK)
