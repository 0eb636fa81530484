# Every target first brings what it needs (scripts/setup.sh), so any of them works on a fresh clone.
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Suites that own the whole machine for their time (nodes, cgroups, timing) run one test after the other.
SERIAL := $(wildcard tests/conformance tests/integration tests/security tests/perf)
PYTHON_FILES := src tests scripts hatch_build.py

.PHONY: setup check test bench rollout rollout-llm clean

setup:
	@scripts/setup.sh

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src hatch_build.py tests/conftest.py tests/leaks.py tests/requirements.py tests/tidy
	$(PYTEST) -q tests/tidy

test: check
	$(PYTEST) -q -n 2 --dist loadfile tests $(addprefix --ignore=,tests/tidy $(SERIAL))
	$(if $(SERIAL),$(PYTEST) -q $(SERIAL))

bench:
	@scripts/setup.sh bench
	$(BIN)/barchan bench sandbox

rollout: setup
	$(BIN)/barchan rollout humaneval --policy oracle

rollout-llm:
	@scripts/setup.sh llm
	$(BIN)/python scripts/serve_smollm.py -- \
		$(BIN)/barchan rollout humaneval --policy chat --base-url {base_url} --model {model}

clean:
	rm -rf build dist src/barchan/_guest .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -r {} +
