# Two commands do everything on a machine with Python 3.11 and pip: `make demo` and `make test`.
# `make test-gpu` and `make bench` use the current interpreter as it is and install nothing.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
STAMP = $(VENV)/.installed

.PHONY: demo test test-gpu bench lint clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
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
	for question in bits overlap_bits stream_step steady_state memory_cap overlap window trace host_update plans models beside peers checkpoints fsdp2 link activations train trainer huggingface host_weights sleep llama largest; do \
		PYTHONPATH=src $(PYTHON) -m benchmarks.$$question || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist src/*.egg-info
