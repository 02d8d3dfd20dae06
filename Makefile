# One word a task. PYTHON is the interpreter that makes the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PYTHON_HERE := $(abspath $(BIN)/python)
GPU := $(shell nvidia-smi -L 2>/dev/null)

# What is imported is compiled once and kept, also where the environment says otherwise: each of the dozen
# processes of a run would compile torch and Ray anew. Nothing else is compiled, so that installing is quick.
unexport PYTHONDONTWRITEBYTECODE

# Where the demo puts its data, runs and MLflow store, and what it trains.
DEMO := $(CURDIR)
ifeq ($(GPU),)
DEMO_RUN := --model tiny --global-batch 8 --steps 30 --cycle 10+1 --learning-rate 3e-3
DEMO_SEARCH := --model tiny --global-batch 4 --memory-limit 4GB --trial-steps 8 --trial-time 5s --confirm-rounds 1
else
# The batch follows the speed of the GPU. The program is installed by the time that a recipe expands this.
DEMO_BATCH = $(shell $(PYTHON_HERE) -c \
	"from infra.device.first_run import global_batch; from infra.device.hardware import device_info; print(global_batch(device_info()))")
DEMO_RUN = --global-batch $(DEMO_BATCH) --time-budget 90s --cycle 10s+1 --device cuda
DEMO_SEARCH = --global-batch $(DEMO_BATCH) --memory-limit 40GB --device cuda
endif

.PHONY: install demo test test-slow test-cuda lint clean bench-tokenize bench-loader bench-overhead bench-search bench-real-grid bench-learning bench-aa bench-precision bench-kernels bench-launches bench-interpreted bench-memory bench-memory-cuda bench-checkpoint-memory bench-scale bench-devices record-textbook campaign-pipeline campaign-train campaign-search campaign-cluster campaign-gpu

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

# The main job on the embedded sample corpus: GPT-2 124M where there is a GPU, a small model where there is none.
demo: install
ifeq ($(GPU),)
	@echo "No GPU found: the demo trains the model 'tiny' on the CPU. With a GPU it trains GPT-2 124M."
endif
	cd $(DEMO) && $(PYTHON_HERE) -m pipeline.tokenize --out data/tokens --workers 2
	cd $(DEMO) && $(PYTHON_HERE) -m train.run --data data/tokens --name demo $(DEMO_RUN)
	cd $(DEMO) && $(PYTHON_HERE) -m tune.search --data data/tokens --name demo-search $(DEMO_SEARCH)
	@echo "Everything is in MLflow; look with: cd $(DEMO) && $(abspath $(BIN))/mlflow ui --backend-store-uri sqlite:///mlflow.db"

# What guards a change, in minutes: numerics, formats, properties, the main job, a search, a kill. Two processes, because
# a test that starts another one waits more than it computes; a file's tests stay together and share what it sets up.
# One where there is a GPU, which tests measure and want for themselves.
PYTEST := $(BIN)/pytest --ignore tests/cluster --numprocesses $(if $(GPU),0,2) --dist loadfile --no-loadscope-reorder
test: install
	$(PYTEST) -m "not slow"

# The rest: several workers, the commands of the guides, the notebook, compilation, survival on Ray. Last those that make a
# cluster of machines, which needs this one for itself, and whose machines import what has been compiled by then: they
# see the installation, and cannot write to it.
test-slow: install
	$(PYTEST) -m slow
	$(BIN)/pytest tests/cluster

# The tests with the marker gpu, with torch's CUDA build in an environment of its own: 7 GB and some minutes. Where there is
# no GPU they run on a pretended one, which tests/cuda builds. CUDA_TORCH is what pip takes from PyPI as a CUDA build.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= torch==2.14.1
test-cuda: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python tests/cuda/run.py $(TESTS)

$(CUDA_VENV)/installed: pyproject.toml constraints.txt
	mkdir -p $(CUDA_VENV)
	$(PYTHON) tests/cuda/machine.py $(CUDA_VENV)
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v '^torch==' constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/pip install --quiet --no-compile --constraint $(CUDA_VENV)/constraints.txt $(CUDA_TORCH) --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# What measures, run by hand on a quiet machine; each writes its record.
RECORDS := tests/benchmarks/records
DATA := data/tokens
BOOKS := books

bench-tokenize: install
	$(BIN)/python -P tests/benchmarks/tokenize.py $(BOOKS) --record $(RECORDS)/tokenize.json

bench-loader: install
	$(BIN)/python -P tests/benchmarks/loader.py --record $(RECORDS)/loader.json

bench-overhead: install
	$(BIN)/python -P tests/benchmarks/overhead.py --data $(DATA) --record $(RECORDS)/overhead.json

bench-search: install
	$(BIN)/python tests/benchmarks/search/compare.py --seeds 200 --out $(RECORDS)/search.json

# Hours of training, which can be interrupted: the same command continues. REPLAY=1 trains nothing.
LEARNING_DATA := data/tokens-512
JOBS ?= 2
bench-learning: install
	$(if $(REPLAY),,$(BIN)/python tests/benchmarks/learning/record.py --books $(BOOKS) --data $(LEARNING_DATA) \
		--jobs $(JOBS) --record $(RECORDS)/learning-grid.json)
	$(BIN)/python tests/benchmarks/learning/compare.py --grid $(RECORDS)/learning-grid.json --out $(RECORDS)/learning.json

bench-aa: install
	$(BIN)/python -P tests/benchmarks/aa.py --pairs 100 --out $(RECORDS)

# With data of 512 token ids, by pipeline.vocabulary --size 512 and pipeline.tokenize; an hour of one core.
bench-precision: install
	$(BIN)/python -P tests/benchmarks/precision.py --data $(DATA) --out runs --record $(RECORDS)/precision.json

bench-memory: install
	$(BIN)/python -P tests/benchmarks/memory.py --record $(RECORDS)/memory.json

bench-kernels: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -P tests/cuda/kernels.py --record $(RECORDS)/kernels.json

bench-launches: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -P tests/cuda/launches.py --record $(RECORDS)/launches.json

bench-interpreted: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -P tests/cuda/interpreted.py --record $(RECORDS)/interpreted.json

bench-memory-cuda: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -P tests/benchmarks/memory_cuda.py --record $(RECORDS)/memory-cuda.json

bench-checkpoint-memory: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -P tests/benchmarks/checkpoint_memory.py --record $(RECORDS)/checkpoint-memory.json

bench-scale: install
	$(BIN)/python -P tests/benchmarks/scale.py --record $(RECORDS)/scale.json

bench-devices: $(CUDA_VENV)/installed
	rm -f $(RECORDS)/devices.json
	DEVICES_RECORD=$(abspath $(RECORDS))/devices.json $(CUDA_VENV)/bin/python tests/cuda/run.py \
		tests/cuda/test_devices.py -m gpu -k "trains_on_the_gpu or running_out or requested_gpu"

# What --compare study shows of a textbook's loop, and the picture of it in tune/README.md.
record-textbook: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python tests/cuda/textbook.py tune/suite/textbook.json
	$(CUDA_VENV)/bin/python -P tests/benchmarks/study_picture.py tune/pictures/study.svg

campaign-pipeline: install
	RECORD=$(RECORDS)/campaign-pipeline.json $(BIN)/pytest tests/pipeline/campaign.py

campaign-search: install
	$(BIN)/python -P tests/benchmarks/campaign_search.py --record $(RECORDS)/campaign-search.json

campaign-train: install
	$(BIN)/python -P tests/benchmarks/campaign_train.py --data $(DATA) --kills 20 --record $(RECORDS)/campaign-train.json

campaign-cluster: install
	RECORD=$(RECORDS)/campaign-cluster.json $(BIN)/pytest tests/cluster/campaign.py

# On a CUDA machine of your own; for a borrowed one see tests/benchmarks/README.md. It begins with the five-minute test and
# ends where that fails. BUILD_NANOGPT and LLM_C are checkouts to compare with. MINUTES=15 ends it within that time; the
# same command goes on from there. The record is written in any case.
MINUTES ?= 600
CAMPAIGN := $(BIN)/python tests/benchmarks/gpu/campaign.py
campaign-gpu: install
	test -e campaign/tokens/manifest.json || $(BIN)/python -m pipeline.tokenize --out campaign/tokens
	$(CAMPAIGN) run --minutes $(MINUTES) \
		$(if $(LLM_C),--llm-c $(LLM_C)) $(if $(BUILD_NANOGPT),--build-nanogpt $(BUILD_NANOGPT)); \
	status=$$?; $(CAMPAIGN) record --records $(RECORDS); exit $$status

# A grid that bench-search replays; it is run in parts, each of at most nine minutes, until it says complete.
bench-real-grid: install
	$(BIN)/python tests/benchmarks/search/real_grid.py --record $(RECORDS)/real-grid.json

clean:
	rm -rf $(VENV) $(CUDA_VENV)
