# Everything starts from a bare Python 3.11 and make: each target sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
FUZZ_SECONDS ?= 600
# Idle OpenMP threads must sleep, not spin: see docs/DEPENDENCIES.md.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0

.PHONY: demo memory test test-flower test-eval test-gpu lint fuzz bench bench-language results clean help

help:
	@echo "make demo     FLITE beside FedAvg on eight clients, two to six minutes after installation"
	@echo "make memory   FedNL on a real language model, two clients, minutes"
	@echo "make test     lint, types, imports and the whole test suite"
	@echo "make test-flower  federations over Flower on this machine, with killed processes and cut off hosts, minutes"
	@echo "make test-gpu on a machine with a CUDA device: kernels, short runs, and a table of throughput"
	@echo "make test-eval  what needs lm-evaluation-harness, minutes"
	@echo "make lint     lint, types and imports only"
	@echo "make fuzz     coverage-guided fuzzing of what reads foreign bytes, FUZZ_SECONDS=600"
	@echo "make bench    the benchmarks: sign map, training step, averaging identity, delta rule, decoding"
	@echo "make bench-language  the benchmarks on SmolLM2: speed, and long streams"
	@echo "make results  the table of docs/RESULTS.md, five seeds"

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[digits,llm,dp,dev]'
	@touch $@

demo: .venv/ready
	$(BIN)/nestling demo

memory: .venv/ready
	$(BIN)/nestling fetch smollm2-135m
	$(BIN)/nestling run needle-smollm2-short

.venv/flower: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[flower]'
	@touch $@

test: lint .venv/flower
	$(BIN)/nestling fetch smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'flower and not faults' tests/test_federation_over_flower.py

test-flower: .venv/flower
	OMP_NUM_THREADS=1 $(BIN)/pytest -m flower tests/test_federation_over_flower.py tests/test_federation_on_hosts.py

test-gpu: .venv/ready
	$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('there is no CUDA device here: nothing to test')"
	$(BIN)/nestling fetch smollm2-135m
	$(BIN)/pytest tests/kernels tests/test_devices.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/throughput.py --device cuda:0

test-eval: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[eval]'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/inference/test_harness.py tests/cli/test_eval_command.py src/nestling/inference

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python fuzz/decode.py --seconds $(FUZZ_SECONDS)

bench: .venv/ready
	$(BIN)/python benchmarks/signs.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/averaging.py
	$(BIN)/python benchmarks/delta_rule.py --lengths 2048 16384
	$(BIN)/python benchmarks/decode.py

bench-language: .venv/ready
	$(BIN)/nestling fetch smollm2-135m
	$(BIN)/nestling fetch shakespeare
	$(BIN)/python benchmarks/language.py
	$(BIN)/python benchmarks/streaming.py

results: .venv/ready
	$(BIN)/nestling demo --seeds 3 4 5 6 7 --markdown

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
