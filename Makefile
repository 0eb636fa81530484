# Every target first brings what it needs (scripts/setup.sh), so any of them works on a fresh clone.
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Suites that own the machine for their time, since they kill nodes, press on memory or watch clocks.
ALONE := tests/security tests/conformance/test_container.py tests/conformance/test_suite.py tests/drills $(patsubst %,tests/integration/test_%.py,calls cli density fork hibernate hibernate_away http late_memory \
	lazy lazy_layer lazy_reader leases memory memory_wakes network node node_restart page_out pager prepared sdk \
	state_cli state_faults tiers warm_pool zygote)
# Whole machines, and the conformance suite on emulated microVMs: minutes, in a target of their own.
MACHINES := tests/integration/test_vm.py tests/integration/test_vm_network.py tests/integration/test_vm_own_disk.py tests/conformance/test_microvm.py
# What waits for minutes, or builds whole images twice.
SLOW := tests/integration/test_silent_clients.py tests/integration/test_image.py
SANITIZED := tests/guest/init tests/guest/pack tests/guest/supervisor
ASAN := $(CURDIR)/build/guest
# The guest suite drives this binary by hand; `test` runs it with the ones under ASan and UBSan.
export BARCHAN_INIT := $(CURDIR)/src/barchan/_guest/barchan-init

# $(call tested,ENVIRONMENT,HOW,WHAT): up to two that fail are run once more, alone: docs/decisions/0025-tests-again.md.
FAILED := $(BIN)/python -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))'
define tested
	$(1) $(PYTEST) -q $(2) $(3) || { [ "$$($(FAILED))" -le 2 ] && echo "make: again, alone:" && \
		$(1) $(PYTEST) -q --last-failed --last-failed-no-failures none $(3); }
endef

.PHONY: setup backends check test test-slow test-vm bench conformance drills hacks faults resume-kills bench-resume rollout rollout-llm rollout-llm-tools soak profile bench-images bench-state bench-backends inspect-check clean

setup:
	@scripts/setup.sh

backends:
	@scripts/setup.sh backends

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src examples hatch_build.py $(wildcard bench/*.py) $(wildcard tests/*.py) tests/tidy tests/packaging
	$(PYTEST) -q tests/tidy

test: check
	@scripts/setup.sh test
	$(call tested,,-n 2 --dist loadfile,tests $(addprefix --ignore=,tests/tidy $(SANITIZED) $(MACHINES) $(SLOW) $(ALONE)))
	$(MAKE) --no-print-directory -C guest OUT=$(ASAN) asan
	$(call tested,BARCHAN_INIT=$(ASAN)/asan/barchan-init,-n 2 --dist loadfile,$(SANITIZED))
	$(call tested,,,$(ALONE))

test-slow: setup
	@scripts/setup.sh test
	$(PYTEST) -q $(SLOW)

# Whole machines; with their first boot and a disk that is built, for minutes.
test-vm: setup
	@scripts/setup.sh test
	$(PYTEST) -q $(MACHINES)

# The whole suite on each backend: minutes each. BACKENDS="container gvisor" for some; vm needs a disk: docs/vm.md.
conformance: backends
	@failed=; for backend in $(or $(BACKENDS),container function gvisor microvm); do $(BIN)/barchan conformance --backend $$backend || failed="$$failed $$backend"; done; \
		[ -z "$$failed" ] || { echo "not conforming:$$failed"; exit 1; }

# Hostile guests on each backend, and what their neighbours notice; on a quiet machine, for minutes.
drills: backends
	BARCHAN_BACKENDS="$(or $(BACKENDS),container function gvisor microvm)" $(PYTEST) -q -s -o python_files="test_*.py neighbours.py" tests/drills

# Every attack on rewards that we know how to make, and its honest twin, as a table and as JSON.
HACKS_OUT ?= build/hacks.json
hacks: setup
	@mkdir -p $(dir $(HACKS_OUT))
	$(BIN)/python -m tests.hacks --json $(HACKS_OUT)

# SIGKILL at every step of a rollout's protocol, for the client, the node and the init, and at random ones; for minutes.
resume-kills: setup
	BARCHAN_RESUME_KILLS=all $(PYTEST) -q tests/integration/test_resume_kills.py

# A trainer that is killed ten times in a run of 1,000 rollouts and resumed, beside an undisturbed one. ROLLOUTS=100 KILLS=5
# for a short one.
RESUME_OUT ?= runs/resume-$(shell date +%Y%m%d-%H%M%S)
bench-resume: out := $(RESUME_OUT)
bench-resume:
	@scripts/setup.sh bench plots
	mkdir -p $(out)
	$(BIN)/python -m bench.resume --rollouts $(or $(ROLLOUTS),1000) --kills $(or $(KILLS),10) --out $(out)/resume.json --picture $(out)/lengths.png

# Every kind of fault done to runs whose true rewards are known: no reward may come of one. TASKS=2 for a short one.
FAULTS_OUT ?= build/faults.json
faults: setup
	@mkdir -p $(dir $(FAULTS_OUT))
	$(BIN)/python -m bench.faults --tasks $(or $(TASKS),10) --out $(FAULTS_OUT)

# Builds our own kernel for microVMs (minutes, and some build tools) and boots it; `make test` takes the distribution's.
test-kernel: setup
	$(BIN)/barchan kernel build
	$(PYTEST) -q tests/guest/boot

bench:
	@scripts/setup.sh bench
	$(BIN)/barchan bench sandbox

rollout: setup
	$(BIN)/barchan rollout humaneval --policy oracle

rollout-llm:
	@scripts/setup.sh llm
	$(BIN)/python scripts/serve_smollm.py -- \
		$(BIN)/barchan rollout humaneval --policy chat --base-url {base_url} --model {model} \
		--temperature 0.2 --max-tokens 256

# The same model with tools, several turns each; its trajectories as ATIF, which Harbor's own reader checks in an
# environment of its own. LIMIT=10 plays fewer tasks, HARBOR_PYTHON names an interpreter of 3.12 or later where none is on the path.
LLM_OUT ?= runs/llm-tools-$(shell date +%Y%m%d-%H%M%S)
rollout-llm-tools: out := $(LLM_OUT)
rollout-llm-tools:
	@scripts/setup.sh llm
	$(BIN)/python scripts/serve_smollm.py --context 4096 -- \
		$(BIN)/barchan rollout humaneval --policy chat --base-url {base_url} --model {model} --tool-format text \
		--max-turns 4 --turn-tokens 128 --temperature 0.5 --seed 1 --concurrency 8 $(if $(LIMIT),--limit $(LIMIT)) --out $(out)
	$(BIN)/barchan trajectory export $(out) --format atif --out $(out)/atif
	$(BIN)/python scripts/check_atif.py --venv build/harbor $(if $(HARBOR_PYTHON),--python $(HARBOR_PYTHON)) $(out)/atif

# Minutes: DURATION=6 for a short one, whose comparisons say less.
soak: setup
	$(BIN)/python scripts/soak.py --minutes $(or $(DURATION),60)

profile: setup
	$(BIN)/python scripts/profile_pipeline.py rate
	$(BIN)/python scripts/profile_pipeline.py slow

# Cold starts on demand and whole, what reading costs, sharing, rebasing; the first run builds an image for minutes.
bench-images:
	@scripts/setup.sh test
	$(BIN)/python -m bench.images_cold
	$(BIN)/python -m bench.images_read
	$(BIN)/python -m bench.images_rebase
	$(BIN)/python -m bench.images_density

# Forks, warm creates, waking, density, a slow model, CPU classes and kills; most of an hour, on a quiet machine.
STATE_OUT ?= runs/state-$(shell date +%Y%m%d-%H%M%S)
bench-state: out := $(STATE_OUT)
bench-state:
	@scripts/setup.sh bench test plots
	mkdir -p $(out)
	$(BIN)/python -m bench.state_fork --by-hand --out $(out)/fork.json
	$(BIN)/python -m bench.state_claim --out $(out)/claim.json
	$(BIN)/python -m bench.state_resume --out $(out)/resume.json
	$(BIN)/python -m bench.state_cpu --out $(out)/cpu.json
	$(BIN)/python -m bench.state_waiting --out $(out)/waiting.json --picture $(out)/waiting.png
	$(BIN)/python -m bench.state_density --way separate --count 2000 --out $(out)/separate.json
	$(BIN)/python -m bench.state_density --way zygote --count 3000 --out $(out)/zygote.json
	$(BIN)/python -m bench.state_density --way hibernated --count 10000 --out $(out)/hibernated.json
	$(BIN)/python -m bench.state_storm --count 1000 --out $(out)/storm.json
	$(BIN)/python -m bench.state_kills --times 50 --out $(out)/kills.json

# Every backend by the same measures in one run, beside bwrap, crun, runc, podman, plain runsc and a plain QEMU boot; some
# 20 minutes on a quiet machine. What is not installed is said: barchan tools install runsc, qemu; barchan kernel build.
BACKENDS_OUT ?= runs/backends-$(shell date +%Y%m%d-%H%M%S)
bench-backends: out := $(BACKENDS_OUT)
bench-backends:
	@scripts/setup.sh bench backends plots
	mkdir -p $(out)
	$(BIN)/python -m bench.backends --count $(or $(COUNT),20) --out $(out)/backends.json --picture $(out)/backends.png

# inspect_ai's own self-check and a small evaluation, in sandboxes of each backend; BACKENDS="container gvisor" for some.
inspect-check: backends
	$(BIN)/python scripts/inspect_check.py $(addprefix --backend ,$(or $(BACKENDS),container gvisor microvm))

clean:
	rm -rf build dist src/barchan/_guest .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -r {} +
