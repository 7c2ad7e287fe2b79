# Everything is set up in .venv and target/; nothing else on the machine is changed.
#
# Variables:
#   PYTHON=python3      the interpreter that .venv is made of (3.10 or newer)
#   TORCH=2.11          the torch minor that .venv gets; with `test-torch`: the one to test the wheel under
#   OXIDION_SHIMS=...   with `wheel`: environments with the torches to compile for, separated by colons (default: .venv)
#   MINORS=all          with `wheel`: fetches headers of every minor that a release serves, and compiles for all
#   ZIG=1               with `wheel`: links for glibc 2.28 by zig, and names the wheel by that
#   AREA="cuda gloo"    with `test-area`: which areas, or `all` (default: what differs from tests/areas.lock)
#   ALG=adamw           with `quick`: contract, algorithm and simulated layouts of one optimizer alone
#   JOBS=2              with `test`, `test-area` and `mutants`: processes side by side, each with up to two threads and 2 GB
#   CASES=2000 SEED=0   with `fuzz`: how many random cases, and which
#   PEERS=.cache/peers  with `bench` and `converge`: folder of the environment with the packages of others
#   DION=~/src/dion     with `device-pack`: a checkout of microsoft/dion to race against
#   REPORT=report.json  with `device-report`: what `.device/go` has left
#   GUARD=...           with `bench`: more arguments for the guard of benchmarks/losses.py, which runs last
#   ARGS=...            with `demo`, `demo-dist`, `quick`, `test`, `mutants`, `fuzz`, `asan`, `miri`, `bench` and `converge`: more arguments for the script, for pytest or for cargo

PYTHON ?= python3
TORCH ?= 2.11
AREA ?=
JOBS ?= 2
CASES ?= 2000
SEED ?= 0
PEERS ?= .cache/peers
ARGS ?=
GUARD ?=
ALG ?=
DION ?=
REPORT ?= .device/out/report.json

VENV := $(CURDIR)/.venv
RUST := $(shell find src -name '*.rs' -o -name '*.cu' -o -name '*.cuh') Cargo.toml Cargo.lock src/torch_names.txt src/torch_shim.cpp
# What is compiled against torch's headers: the library next to the core, and the one that tests of the core run with.
SHIM := python/build_shim.py python/oxidion/_torch/compiler.py src/torch_names.txt src/torch_shim.cpp Cargo.lock
SHIM_OF_TESTS := target/shim/test/liboxidion_torch.so
LIBRARIES = $(CURDIR)/$(dir $(SHIM_OF_TESTS)):$$(python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/lib
# What importing the package sets where bfloat16 products of libtorch crash: tests of the core need it too.
ONEDNN = $$(python -c 'import os, oxidion; print(*(f"{k}={v}" for k, v in os.environ.items() if k == "ONEDNN_MAX_CPU_ISA"))')
# The extension of `make dev`: of the dependencies of `make build`, with the crate itself compiled in small pieces that
# are not optimized together. Kernels are up to ten times slower, and an edit is importable in seconds.
DEV := --config profile.release.incremental=true --config profile.release.package.oxidion.codegen-units=64
# The tests of the core: of the same dependencies, with the checks of a debug build in the crate itself.
CORE := --release $(foreach key,debug-assertions=true overflow-checks=true,--config profile.release.package.oxidion.$(key))
CORE_FEATURES := --no-default-features --features cuda,internals,tch/python-extension
# The stamp of an extension that was installed since the list of dependencies changed.
INSTALLED = $(shell find $(VENV) -maxdepth 1 -name '.built-*' -newer $(VENV)/.deps)
# The extension that is installed. Where there is none, what needs no fast kernels makes that of `make dev`.
BUILT := $(or $(firstword $(wildcard $(VENV)/.built-release $(VENV)/.built-dev)),$(VENV)/.built-dev)
# What depends on torch's version: its objects, hooks, checkpoints, DTensors and process groups.
TESTS_OF_TORCH := tests/contract tests/test_golden.py tests/test_golden_low_rank.py tests/test_param_groups.py tests/test_torch_versions.py tests/distributed
CORE_TESTS = env $(ONEDNN) LD_LIBRARY_PATH="$(LIBRARIES)" cargo test --lib $(CORE) $(CORE_FEATURES)
CLIPPY = cargo clippy --release --all-targets --all-features -- -D warnings
PYTEST_TOGETHER = OMP_WAIT_POLICY=passive python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
# On x86-64 the core asks the CPU for its maker, by an instruction that Miri does not know.
MIRI = cd tests/rust/miri && CARGO_TARGET_DIR=$(CURDIR)/target/miri MIRIFLAGS="$(1)" \
	cargo +nightly miri test --locked --target aarch64-unknown-linux-gnu
comma := ,
OTHER := $(CURDIR)/.cache/torch/$(TORCH)
export OXIDION_SHIMS ?= $(VENV)

# maturin asks the `python` on PATH; a conda environment and VIRTUAL_ENV at once confuse maturin.
export PATH := $(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(VENV)
export MATURIN_NO_MISSING_BUILD_BACKEND_WARNING := 1
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH

.DELETE_ON_ERROR:
.PHONY: help demo demo-dist build dev quick lint deny fuzz test test-area test-all frameworks mutants test-torch test-cuda asan miri bench bench-cuda bench-quick device-pack device-report converge docs site wheel wheel-aarch64 all

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@sed -n '/^# Variables/,/^$$/s/^# *//p' $(MAKEFILE_LIST)

demo: $(BUILT) ## Train a small GPT with Dion, Muon and AdamW and plot their losses
	python examples/train_gpt.py --steps 120 $(ARGS)

demo-dist: $(BUILT) ## Train it in 4 processes, sharded (FSDP2 and tensor parallel), and compare with one process
	OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --mesh fs=2,tp=2 --rank-fraction 0.25 --dtype float64 --steps 60 --compare --tolerance 1e-6 $(ARGS)

build: $(VENV)/.built-release ## Compile the extension and install the package and its tools into .venv

dev: $(VENV)/.built-dev ## The same for development: compiled in seconds after a change, with slower kernels

quick: dev ## Lint, type-check and run the tests that a change calls for (a minute), or those of one optimizer: ALG=adamw
	$(if $(ALG),,$(CLIPPY))
	$(if $(ALG),,ruff check && ruff format --check && mypy)
	python tests/quick.py $(if $(ALG),--alg $(ALG)) $(ARGS)

test: build $(SHIM_OF_TESTS) ## Run the tests of the core, and all of the package at one representative of each kind
	$(CORE_TESTS)
	$(PYTEST_TOGETHER) -m "not slow" --area product $(ARGS)

test-area: build ## Run areas of tests, AREA="cuda gloo" or all, and record the green ones; without AREA what has changed
	OMP_WAIT_POLICY=passive python tests/areas.py run $(AREA) --jobs $(JOBS) $(ARGS)

frameworks: $(VENV)/.frameworks-$(TORCH) ## Install the frameworks that the area of this name trains in

mutants: build $(SHIM_OF_TESTS) ## Plant small faults in a copy of the sources and tell which of them the tests find (at night)
	PYTHONPATH=tests python -m mutants --jobs $(JOBS) --areas $(ARGS)

asan: build ## Run what Python does within a step with the core under AddressSanitizer, which needs nightly Rust and libasan (15 minutes)
	RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan cargo +nightly build --release --lib --features extension-module \
		--target x86_64-unknown-linux-gnu --config profile.release.package.oxidion.codegen-units=64
	mkdir -p target/asan/package && cp -r python/oxidion target/asan/package/
	cp target/asan/x86_64-unknown-linux-gnu/release/lib_oxidion.so target/asan/package/oxidion/_oxidion.abi3.so
	PYTHONPATH=target/asan/package ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		python -m pytest -q tests/contract/test_python_in_a_step.py -k survives $(ARGS)

miri: ## Run the rooms of the core that need no libtorch under Miri, which finds undefined behaviour (five minutes)
	@found=$$(rustup component list --toolchain nightly --installed 2>&1); \
	case "$$found" in *miri*rust-src*) ;; *) \
	echo "error: no Miri; rustup toolchain install nightly --component miri,rust-src" >&2; exit 1;; esac
	@# Everything by Stacked Borrows; teams again, scheduled in four other ways; by Tree Borrows with the pool of rayon.
	$(call MIRI,-Zmiri-strict-provenance) $(ARGS)
	$(call MIRI,-Zmiri-strict-provenance -Zmiri-many-seeds=0..4 -Zmiri-preemption-rate=0.003) --test threads
	$(call MIRI,-Zmiri-tree-borrows -Zmiri-permissive-provenance -Zmiri-ignore-leaks) --features rayon --test threads

deny: ## Check licences, sources, duplicates and published advisories of the crates by cargo-deny, which fetches the advisories
	@cargo deny --version >/dev/null 2>&1 || { echo "error: no cargo-deny 0.16 or newer; cargo install cargo-deny --locked" >&2; exit 1; }
	cargo deny check --config .ci/deny.toml

fuzz: $(BUILT) ## Run random cases of steps, layouts, state dicts, plans and the command line in child processes: CASES=2000 SEED=0
	PYTHONPATH=tests python -m fuzz --cases $(CASES) --seed $(SEED) --jobs $(JOBS) $(ARGS)

test-all: build $(SHIM_OF_TESTS) test ## Run every test: `make test`, all areas, and what is slow (at night)
	$(MAKE) test-area AREA=all
	python -m pytest -m slow $(ARGS)

lint: $(BUILT) $(SHIM_OF_TESTS) site ## Check formatting, lints, types, uses that must not compile, the stub of the extension and the site
	cargo fmt --check
	rustfmt --check --edition 2024 $(shell git ls-files --cached --others 'src/algorithm/*.rs' 'src/kernels/ops/*.rs')  # modules of a macro
	$(CLIPPY)
	cargo clippy --release --all-targets --no-default-features -- -D warnings
	cd tests/rust/miri && CARGO_TARGET_DIR=$(CURDIR)/target/miri cargo check -q --locked --tests  # without Miri
	$(subst --lib,--doc,$(CORE_TESTS))
	ruff check
	ruff format --check
	mypy
	python -m mypy.stubtest oxidion._oxidion

bench: build ## Time every class against torch's optimizers and all peers, compiled too, and train the guard (two hours on two cores)
	python benchmarks/peers.py $(PEERS)
	python benchmarks/step.py --peer-path $(PEERS)/packages --compiled bars $(ARGS)
	python benchmarks/losses.py orthonormalization $(GUARD)

test-torch: $(OTHER)/.ready ## Run the tests of contract, goldens, layouts and gloo with the wheel in dist/ under another torch: TORCH=2.7
	$(OTHER)/bin/python -m pip install -q --no-deps --force-reinstall $$(ls -t dist/*.whl | head -1)
	$(OTHER)/bin/python -m oxidion env
	OMP_WAIT_POLICY=passive $(OTHER)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not cuda" $(or $(ARGS),$(TESTS_OF_TORCH))

test-cuda: ## Run the CUDA tests on the GPU of this machine, with the package that PYTHON has installed
	$(PYTHON) -m pytest -q tests/cuda -m cuda $(ARGS)

bench-cuda: ## Time steps on the GPU of this machine, with the package that PYTHON has installed
	$(PYTHON) benchmarks/cuda.py $(ARGS)

device-pack: build ## Pack all that a quarter of an hour on a GPU needs into .device and rehearse it (ten minutes); DION=... races microsoft/dion
	python benchmarks/device_pack.py $(if $(DION),--dion $(DION)) --nvrtc "$$(python .ci/nvrtc.py .cache/nvrtc)" $(ARGS)

device-report: ## Take a report of that run into docs and benchmarks: REPORT=report.json
	$(PYTHON) benchmarks/device_report.py $(REPORT)

converge: build ## Train small problems whose outcome is known and check it (two minutes), and the committed curves
	python benchmarks/peers.py $(PEERS) --only mnist1d==0.0.2.post1
	python benchmarks/tasks.py --peer-path $(PEERS)/packages $(ARGS)
	python benchmarks/convergence_bars.py

bench-quick: build ## A few short races against torch's optimizers (two minutes)
	python benchmarks/step.py --quick $(ARGS)

docs: $(BUILT) site ## Build the documentation of the core and the site, and run the code blocks of all pages
	RUSTDOCFLAGS="-D warnings" cargo doc --release --no-deps --no-default-features --features internals
	python -m pytest tests/meta/test_docs.py

site: $(BUILT) $(VENV)/.docs ## Build the documentation site into target/site, with warnings as errors, and check it
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	python -m pytest tests/meta/test_site.py

new-optimizer: ## Write the files of a new optimizer, which is SGD with momentum until they are edited: NAME=ademamix CLASS=AdEMAMix
	$(PYTHON) .ci/new_optimizer.py $(NAME) $(if $(CLASS),--class-name $(CLASS)) $(if $(KIND),--kind $(KIND))

wheel: build ## Build an abi3 wheel into dist/ and check it, with machine code for sm_80, sm_90a and sm_100; MINORS=all ZIG=1 as released
	python -m pip install -q $(if $(ZIG),"ziglang==0.15.*" cargo-zigbuild) abi3audit
	python tests/cuda/compile.py --cubins target/cubins --nvrtc "$$(python .ci/nvrtc.py .cache/nvrtc)"
	$(if $(MINORS),OXIDION_SHIMS=$$(python .ci/torches.py .cache/torches)) python python/build_shim.py --into target/shim/wheel
	OXIDION_CUBINS=$(CURDIR)/target/cubins OXIDION_TORCH_FILES=$(CURDIR)/target/shim/wheel \
	maturin build --profile dist --strip --out dist $(if $(ZIG),--zig --compatibility manylinux_2_28)
	python -m pytest -q -m slow tests/test_wheel.py

wheel-aarch64: $(VENV)/.deps ## Build the wheel for aarch64 Linux on x86-64, and step in an emulator: .ci/RELEASING.md says what it needs
	python -m pip install -q "ziglang==0.15.*" cargo-zigbuild
	CXX=aarch64-linux-gnu-g++ OXIDION_SHIMS=$$(python .ci/torches.py .cache/torches-aarch64 manylinux_2_28_aarch64) \
	python python/build_shim.py --into target/shim/wheel-aarch64
	OXIDION_TORCH_FILES=$(CURDIR)/target/shim/wheel-aarch64 \
	maturin build --profile dist --strip --out dist --target aarch64-unknown-linux-gnu --zig --compatibility manylinux_2_28
	python .ci/aarch64.py .cache/aarch64 dist/oxidion-*-manylinux_2_28_aarch64.whl

all: build lint test docs wheel ## Everything that must pass before a release

$(VENV)/.python:
	@command -v cargo >/dev/null || { echo "error: no cargo on PATH; install Rust from https://rustup.rs" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "error: no C++ compiler (c++) on PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; use make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	python -m pip install -q --upgrade "pip>=25.1"
	touch $@

$(VENV)/.deps: $(VENV)/.python pyproject.toml
	python -m pip install -q --group build
	touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml
	python -m pip install -q --group docs
	touch $@

$(VENV)/.torch-$(TORCH): $(VENV)/.python
	python -m pip install -q "torch==$(TORCH).*" numpy
	rm -f $(VENV)/.torch-*  # one is installed
	touch $@

# torchvision 0.26 is made for torch 2.11.
$(VENV)/.frameworks-$(TORCH): $(VENV)/.torch-$(TORCH) pyproject.toml
	echo "torch==$(TORCH).*" > $(VENV)/torch.txt
	python -m pip install -q -c $(VENV)/torch.txt --group frameworks "torchvision==0.$$(($(word 2,$(subst ., ,$(TORCH))) + 15)).*"
	rm -f $(VENV)/.frameworks-*
	touch $@

python/oxidion/_torch/table.json: $(VENV)/.torch-$(TORCH) $(SHIM)
	python python/build_shim.py --into python/oxidion/_torch --torch $(VENV)
	touch $@

$(SHIM_OF_TESTS): $(VENV)/.torch-$(TORCH) $(SHIM) tests/rust/torch_names.txt
	python python/build_shim.py --test $(@D) --torch $(VENV)
	touch $@

# The default wheel without its CUDA libraries, which are several GB: stand-ins are enough to load it.
$(OTHER)/.ready: pyproject.toml tests/support/stand_ins.py
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip install -q --no-deps "torch==$(TORCH).*"
	$(OTHER)/bin/python -m pip install -q typing-extensions sympy networkx jinja2 fsspec filelock numpy setuptools "pip>=25.1"
	sed -n 's/^test = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",' | tr ' ' '\n' > $(OTHER)/tests.txt
	$(OTHER)/bin/python -m pip install -q -r $(OTHER)/tests.txt
	PYTHONPATH=tests $(OTHER)/bin/python -m support.stand_ins $(OTHER)/lib/python3.*/site-packages/torch
	touch $@

$(VENV)/.built-release $(VENV)/.built-dev: $(VENV)/.built-%: $(VENV)/.deps python/oxidion/_torch/table.json $(RUST)
	maturin develop --release $(if $(INSTALLED),--skip-install,--extras test$(comma)lint$(comma)examples$(comma)bench) $(if $(filter dev,$*),$(DEV) -- -C lto=off)
	rm -f $(VENV)/.built $(VENV)/.built-*  # one extension is installed
	touch $@
