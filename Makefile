# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin/python

.PHONY: setup demo test unit engine lint format model vectors clean

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	@$(BIN) -m kvprov demo

test: lint unit engine

lint: setup
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy

unit: setup
	$(BIN) -m pytest -q -n 2 -m "not engine"

engine: setup
	$(BIN) -m pytest -q -n 2 --dist loadfile -m engine

format: setup
	$(BIN) -m ruff format .
	$(BIN) -m ruff check --fix .

model: setup
	$(BIN) models/tiny-reviews/train.py

vectors: setup
	$(BIN) scripts/make_vectors.py
	$(BIN) scripts/make_identity_vectors.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
