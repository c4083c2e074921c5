# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin/python

OTHER_RELEASES := 0.30.0 0.31.0
SMOKE := tests/engines/bindings/test_offloading_matrix.py tests/engines/test_updates.py

.PHONY: setup demo test unit engine test-releases lint format model bindings vectors clean

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

# In the order of names: by default, files of few tests come last, and the longest of them would run alone.
engine: setup
	$(BIN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m engine

# A few of the engine tests on the other releases that README names, each in an environment of its own.
test-releases:
	@for release in $(OTHER_RELEASES); do \
		$(PYTHON) scripts/setup_env.py --release $$release && \
		.venv-$$release/bin/python -m pytest -q -n 2 --dist loadfile $(SMOKE) || exit 1; \
	done

format: setup
	$(BIN) -m ruff format .
	$(BIN) -m ruff check --fix .

model: setup
	$(BIN) models/tiny-reviews/train.py

# After `make engine`: what it measured, into docs/bindings.md. Read the difference.
bindings: setup
	$(BIN) scripts/make_bindings_table.py

vectors: setup
	$(BIN) scripts/make_vectors.py
	$(BIN) scripts/make_identity_vectors.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
