# make demo: see it work. make test: prove it. make check: style, types, import order.
# Everything lives in .venv; both are quick no-ops when it is up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := smollm2-135m

.PHONY: demo test test-slow test-faults check protos model clean

demo: model
	@$(BIN)/disagg demo --model $(MODEL)

# Two at a time, because many tests wait for deadlines. Files in their order, which has the
# long ones in the middle, and each on one worker, for the clusters that its tests share.
test: model
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: model
	@$(BIN)/python -m pytest -m slow

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -m faults

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

model: $(INSTALLED)
	@$(BIN)/disagg pull $(MODEL)

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. protos/pd/v1/*.proto

clean:
	rm -rf $(VENV)
