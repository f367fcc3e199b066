# Two commands do everything on a machine with Python 3.11 and pip: `make demo` and `make test`.
# `make test-gpu` and `make bench` use the current interpreter as it is and install nothing.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
STAMP = $(VENV)/.installed
INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The tests need none of what these would bring along; megatron-core runs on Python 3.11, though its wheel is for 3.12.
ENGINES = --no-deps --only-binary=:all: --python-version 3.12 --ignore-requires-python --upgrade \
	--target $$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') megatron-core spmd_types torchtitan

.PHONY: demo test test-gpu bench lint clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0 setuptools
	$(INSTALL) --no-build-isolation -e '.[dev]'
	$(INSTALL) $(ENGINES)
	touch $@

demo: $(STAMP)
	$(RUN) -m examples.demo

lint: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# Two processes, a file each: the files share what they set up.
test: lint
	$(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu tests/gpu

bench:
	for question in bits overlap_bits stream_step steady_state memory_cap overlap window trace host_update plans models beside peers megatron checkpoints fsdp2 link activations train trainer huggingface host_weights sleep rl_loop llama largest fit; do \
		PYTHONPATH=src $(PYTHON) -m benchmarks.$$question || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist src/*.egg-info
