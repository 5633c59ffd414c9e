# Everything happens in .venv; a fresh clone needs Python 3.11 and a C++ compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-all test-cuda test-cuda-all test-torch bench lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/python -m examples.demo

test: install lint
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist worksteal

test-all: install lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# CUDA code on a device that computes nothing: PyTorch's CUDA build (5 GB) in an environment of its own.
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed

$(CUDA_STAMP): pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV) || python3 -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet 'torch===2.13.0' nvidia-cuda-crt==13.0.88
	$(CUDA_VENV)/bin/python -m pip install --quiet -c constraints.txt numpy rich jinja2 pytest hypothesis
	touch $(CUDA_STAMP)

ON_NULL_DEVICE = env $$($(CUDA_VENV)/bin/python tests/nullcuda/build.py $(CUDA_VENV)/nullcuda) PYTHONPATH=src \
	$(CUDA_VENV)/bin/python -m pytest -q tests/nullcuda

test-cuda: $(CUDA_STAMP)
	$(ON_NULL_DEVICE) -m "nullcuda and not slow"

test-cuda-all: $(CUDA_STAMP)
	$(ON_NULL_DEVICE) -m nullcuda

# A smoke suite with another version of PyTorch, on the CPU, in an environment of its own (1.6 GB). The registry's plain
# wheel is the CUDA build: libraries that answer "no device" take the place of CUDA's, and pip's complaints that CUDA's
# packages are missing are expected.
VERSION ?= 2.15.0
TORCH_VENV := .venv-torch-$(VERSION)
TORCH_STAMP := $(TORCH_VENV)/.installed

$(TORCH_STAMP): pyproject.toml tests/torch_versions/without_cuda.py
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV) || python3 -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-deps 'torch===$(VERSION)'
	$(TORCH_VENV)/bin/python -m pip install --quiet filelock typing-extensions 'setuptools>=77' sympy networkx jinja2 fsspec \
	    numpy rich matplotlib pytest hypothesis
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(TORCH_VENV)/bin/python tests/torch_versions/without_cuda.py
	touch $(TORCH_STAMP)

test-torch: $(TORCH_STAMP)
	$(TORCH_VENV)/bin/python -m pytest -q tests/torch_versions tests/test_import.py tests/test_readme.py

bench: install
	for suite in spine steps lengths fast echo gist rnn rnn-workloads plan accuracy devices bptt; do $(BIN)/python -m benchmarks $$suite || exit 1; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(CUDA_VENV) .venv-torch-* build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
