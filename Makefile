# What a user types. Each target does all the set-up it needs; a second run starts at once.
#
#   make demo    the pilot works in a real browser, then a report
#   make test    lint, types, tests
#   make setup   only the set-up (.venv, dependencies, Chromium)
#
# To install another build of torch (see README), name it: make setup TORCH=... PIP_ARGS=...

export PIP_ARGS TORCH PYTHON
BIN := .venv/bin

.PHONY: help setup test demo lint format clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@sh scripts/setup.sh

demo: setup
	@$(BIN)/holotron demo $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: lint
	@$(BIN)/pytest -q $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/holotron.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
