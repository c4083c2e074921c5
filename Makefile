# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin/python

OTHER_RELEASES := 0.30.0 0.31.0
SGLANG_RELEASES := 0.5.20 0.5.23
SMOKE := tests/engines/bindings/test_offloading_matrix.py tests/engines/test_updates.py

.PHONY: setup setup-sglang demo test unit engine engine-sglang test-releases lint format model bindings sglang-table vectors check-smollm2 clean

setup:
	@$(PYTHON) scripts/setup_env.py

setup-sglang:
	@$(PYTHON) scripts/setup_env.py --engine sglang --release $(SGLANG_RELEASES)

demo: setup
	@$(BIN) -m kvprov demo

test: lint unit engine engine-sglang

lint: setup
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy

unit: setup
	$(BIN) -m pytest -q -n 2 -m "not engine"

# In the order of names: by default, files of few tests come last, and the longest of them would run alone.
engine: setup
	$(BIN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m engine

# The releases one after another: each has processes on both cores.
engine-sglang: setup-sglang
	@for release in $(SGLANG_RELEASES); do \
		.venv-sglang-$$release/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m engine \
			tests/engines/sglang tests/check/audit/test_sglang.py || exit 1; \
	done

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

# After `make engine-sglang`: what it measured, into docs/sglang.md. Read the difference.
sglang-table: setup
	$(BIN) scripts/make_sglang_table.py

vectors: setup
	$(BIN) scripts/make_vectors.py
	$(BIN) scripts/make_identity_vectors.py

# The offline check on a real model of 135 million parameters, of which 93 MB are fetched. Opt-in: it takes minutes.
check-smollm2: setup
	-$(PYTHON) scripts/fetch_smollm2.py
	SMOLLM2=$(CURDIR)/build/smollm2-135m $(BIN) -m pytest -q -s tests/check/test_smollm2.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
