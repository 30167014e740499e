# The commands of the README:
#   make demo   train a small CNN on real scans, quantize it, run it on int8 kernels, show the report
#   make test   lint, types, import contracts, docs check, and the tests; under 15 minutes on two cores
#   make quick  lint, contracts and the tests of one room, in at most 90 seconds: make quick ROOM=prepare
#   make long   the tests of tests/long_tests.txt, which take seconds each: stock models, compilers, whole exports
#   make bench  speed, quality, calibration, scaling, memory, start, beside the peers; about 20 minutes.
#               One section: make bench-models (-calibration, -scaling, -memory, -startup, -profiles,
#               -kernels, -qat, -roofline, -decoder, -quick: six models in 4 minutes), and, hours long, bench-deploy: models on the targets of export; options: make bench-models BENCH="--models resnet18 --peers backquant ort_int8"
# Of a release:
#   make wheel  the wheel in dist/ with the library of kernels for all CPUs of this kind, the same bytes from every
#               checkout of a commit and every run of one C++ compiler, which it needs
#   make sbom   out/backquant.cdx.json: what the package needs, at the versions of constraints.txt (CycloneDX)
#   make site   the documentation as a site, out/site/html: mkdocs, in .venv-site
#   make audit  known vulnerabilities of those versions, of the extras and of the tests; needs a network
# Each creates its own environment in .venv, bench in .venv-bench, those of a release in .venv-release. On a machine with CUDA wheels as pip's default, ask for
# the CPU build with:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BACKEND ?= x86
JOBS ?= auto
BENCH_VENV ?= .venv-bench
BENCH ?=
RELEASE_VENV ?= .venv-release

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
# Bytecode is written when a module is first imported, also where the machine asks Python not to (the
# tests start many processes): most modules of these packages never are.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(PIP) install --quiet --no-compile $(INDEX) -c constraints.txt

SITE_VENV ?= .venv-site

.PHONY: site demo test quick check lint types contracts sizes docs docs-check unit long bench install-bench wheel sbom audit clean

demo: $(VENV)/.demo
	$(BIN)/backquant demo --backend $(BACKEND) --out out/demo

test: check unit

check: lint types contracts docs-check

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

contracts: $(VENV)/.test
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

sizes: $(VENV)/.test
	$(BIN)/python tools/check_size.py src/backquant

docs: $(VENV)/.test
	$(BIN)/python tools/generate_backend_docs.py
	$(BIN)/python tools/figures.py

docs-check: $(VENV)/.test
	$(BIN)/python tools/generate_backend_docs.py --check
	$(BIN)/python tools/figures.py --check

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --durations=10

unit: $(VENV)/.test
	$(PYTEST) -m "not long"

# Without ROOM: the calls that everyone makes, the report, the start of the command line.
ROOM ?=
QUICK := $(if $(ROOM),tests/$(ROOM),tests/api/test_calls.py tests/report tests/cli/test_startup.py tests/test_errors.py)

quick: lint contracts
	$(PYTEST) -m "not long" $(QUICK)

long: $(VENV)/.test
	$(PYTEST) -m long

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "backquant is tested with Python 3.11: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) torch numpy
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt requirements-stock.txt | $(VENV)/bin/python
	$(INSTALL) torch numpy
	$(INSTALL) -e '.[test]'
	$(PIP) install --quiet --no-compile --no-deps -r requirements-stock.txt
	touch $@

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks --out out/bench $(BENCH)

bench-accuracy: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks.tasks --out out/bench $(BENCH)

bench-decoder: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks.decoder --out out/bench $(BENCH)

bench-%: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks $* --out out/bench $(BENCH)

# The peers and what draws the pictures; nothing of it is needed to use the library.
$(BENCH_VENV)/.bench: pyproject.toml constraints.txt requirements-stock.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(MAKE) VENV=$(BENCH_VENV) install-bench
	touch $@

install-bench:
	$(INSTALL) torch numpy
	$(INSTALL) -e '.[bench]'
	$(PIP) install --quiet --no-compile --no-deps -r requirements-stock.txt

wheel: $(VENV)/.test
	$(BIN)/python tools/build_wheel.py dist

# The wheel with what it declares and nothing else, looked at by a tool that lies outside of it.
sbom: wheel $(RELEASE_VENV)/.release
	rm -rf $(RELEASE_VENV)/installed && $(PYTHON) -m venv $(RELEASE_VENV)/installed
	$(RELEASE_VENV)/installed/bin/python -m pip install --quiet $(INDEX) -c constraints.txt dist/*.whl
	mkdir -p out
	$(RELEASE_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-reproducible -o out/backquant.cdx.json $(RELEASE_VENV)/installed/bin/python

# The documentation as a site in out/site/html; a broken link or a warning is a failure.
site: $(SITE_VENV)/.site
	$(SITE_VENV)/bin/python tools/site.py out/site
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --config-file tools/mkdocs.yml --strict --quiet

$(SITE_VENV)/.site: requirements-site.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet -r requirements-site.txt
	touch $@

# What cannot be looked up is a failure.
audit: $(RELEASE_VENV)/.release
	$(RELEASE_VENV)/bin/python tools/audit.py constraints.txt requirements-stock.txt

$(RELEASE_VENV)/.release:
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8' 'pip-audit>=2.9,<3'
	touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(RELEASE_VENV) $(SITE_VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
