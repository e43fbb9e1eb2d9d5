# Every target sets up what it needs. README.md says what each one is for.
#   PYTHON        interpreter to make the virtual environment with, 3.10 to 3.12
#   PIP_FLAGS     more options for `pip install`
#   WORKERS       test processes at a time
#   PYTEST_FLAGS  more options for pytest
PYTHON ?= python3
PIP_FLAGS ?=
WORKERS ?= 2
PYTEST_FLAGS ?=

.NOTPARALLEL:
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo demo-mindspore bench test test-full test-oldest \
	test-torch test-simulator test-parallel test-mindspore test-docs lint docs clean

help:
	@echo 'make demo | demo-mindspore | bench | test | test-full | test-oldest | lint | docs | clean'

# ---- set-up ---------------------------------------------------------------------------

# numpy<2, which MindSpore 2.10 needs, has no wheels for Python 3.13 and later.
define check_python
@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
	echo "Python 3.10, 3.11 or 3.12 is needed; $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)."; \
	echo 'Name another one with: make $(MAKECMDGOALS) PYTHON=python3.11'; exit 1; }
endef

EXTRAS_demo := demo,torch
EXTRAS_test := demo,mindspore,test,torch
EXTRAS_docs := docs

# The package itself is installed editable: only a change of these files needs a new set-up.
.venv/%.stamp: setup.cfg pyproject.toml constraints-ci.txt
	$(check_python)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-warn-conflicts $(PIP_FLAGS) \
		-c constraints-ci.txt -e '.[$(EXTRAS_$*)]'
	$(if $(filter test,$*),$(install_mindformers))
	touch $@

# The optimizer needs none of its dependencies, and one of them is not on PyPI. That pip would
# report them as missing in every later installation is why --no-warn-conflicts is there.
install_mindformers = .venv/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps \
	-c constraints-ci.txt mindformers

# The oldest torch that the `torch` extra lets in.
.venv-oldest/torch.stamp: setup.cfg pyproject.toml constraints-ci.txt
	$(check_python)
	$(PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==2.7.1/' constraints-ci.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet $(PIP_FLAGS) \
		-c .venv-oldest/constraints.txt -e '.[test,torch]'
	touch $@

# ---- tests ----------------------------------------------------------------------------

# One thread per process, or the workers fight over the cores.
test-torch test-simulator test-parallel test-mindspore test-docs test-oldest: export OMP_NUM_THREADS := 1
test-torch test-simulator test-parallel test-mindspore test-docs test-oldest: export MKL_NUM_THREADS := 1
test-torch test-simulator test-parallel test-mindspore test-docs test-oldest: export OPENBLAS_NUM_THREADS := 1

# Where a GPU is visible, pinned memory is CUDA's and not the simulated device's.
test-simulator test-mindspore test-docs: export CUDA_VISIBLE_DEVICES :=
ifeq ($(strip $(SWAP_ADAM_TEST_DEVICE)),)
test-torch test-oldest: export CUDA_VISIBLE_DEVICES :=
endif

# Where a GPU is visible, pinned memory is CUDA's and not the simulated device's.
test-simulator test-mindspore test-docs: export CUDA_VISIBLE_DEVICES :=
ifeq ($(strip $(SWAP_ADAM_TEST_DEVICE)),)
test-torch test-oldest: export CUDA_VISIBLE_DEVICES :=
endif

PYTEST_OPTIONS = -n $(WORKERS) $(PYTEST_FLAGS)
PYTEST = .venv/bin/python -m pytest $(PYTEST_OPTIONS)

# Each part is a process of its own: torch and MindSpore must not share one, nor may the
# simulated device share one with a real device (SWAP_ADAM_TEST_DEVICE). All parts run, also
# when an earlier one has failed.
test: .venv/test.stamp
	@$(MAKE) --no-print-directory --keep-going \
		lint test-docs test-mindspore test-simulator test-parallel test-torch

test-full: export SWAP_ADAM_TEST_FULL := 1
test-full: test

# A folder that does not exist yet is named and passed over; one without tests is an error.
pytest_folders = $(foreach folder,$(2),$(if $(wildcard $(folder)),,$(info No $(folder) yet)))$(if \
	$(wildcard $(2)),$(1) $(wildcard $(2)))

test-torch: .venv/test.stamp
	$(call pytest_folders,$(PYTEST),tests/core tests/packaging tests/with_torch tests/drop_in tests/speed)

test-simulator: .venv/test.stamp
	$(call pytest_folders,$(PYTEST),tests/simulator tests/demo)

# A test starts processes of its own, two or more at a time.
test-parallel: .venv/test.stamp
	$(call pytest_folders,$(PYTEST),tests/parallel)

test-mindspore: .venv/test.stamp
	$(call pytest_folders,$(PYTEST),tests/with_mindspore)

# The Python examples in the documentation. Those for MindSpore, and those that enable the simulated
# accelerator, which must come before the first backward pass, have a process for each page.
DOCS := README.md $(wildcard docs/*.md docs/*/*.md)
DOCS_MINDSPORE := $(strip $(foreach page,$(DOCS),$(if $(findstring mindspore,$(page)),$(page))))
DOCS_SIMULATOR := $(shell grep -l '^simulator\.enable()' $(filter-out $(DOCS_MINDSPORE),$(DOCS)))
DOCS_TORCH := $(filter-out $(DOCS_MINDSPORE) $(DOCS_SIMULATOR),$(DOCS))

test-docs: .venv/test.stamp
	$(PYTEST) --markdown-docs $(DOCS_TORCH)
	for page in $(DOCS_SIMULATOR); do $(PYTEST) --markdown-docs $$page; done
	$(if $(DOCS_MINDSPORE),$(PYTEST) --markdown-docs $(DOCS_MINDSPORE))

test-oldest: .venv-oldest/torch.stamp
	$(call pytest_folders,.venv-oldest/bin/python -m pytest $(PYTEST_OPTIONS),tests/simulator)
	$(call pytest_folders,.venv-oldest/bin/python -m pytest $(PYTEST_OPTIONS),tests/core tests/with_torch tests/drop_in)

lint: .venv/test.stamp
	.venv/bin/python -m flake8 swap_adam tests
	.venv/bin/python -m mypy
	.venv/bin/lint-imports

# ---- what there is to see -------------------------------------------------------------

demo: .venv/demo.stamp
	.venv/bin/python -m swap_adam demo

demo-mindspore: .venv/test.stamp
	.venv/bin/python -m swap_adam demo --framework mindspore

bench: .venv/demo.stamp
	.venv/bin/python -m swap_adam bench

docs: .venv/docs.stamp
	.venv/bin/mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest build dist site demo-output *.egg-info \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache
