# dsec: `make` alone prints what there is. On a fresh Debian 12 machine, as
# root, `make demo` and `make test` each do all they need, setup included.

SHELL        := /bin/bash
.SHELLFLAGS  := -euo pipefail -c
MAKEFLAGS    += --no-builtin-rules
# What scripts/setup fetched wins over nothing only: a Go in PATH is used as it is.
export PATH  := $(PATH):$(CURDIR)/.toolchain/bin

GO           ?= go
# Tests do not need a binary that the compiler has a profile of, and it compiles
# all that goes into one once more: minutes. What ships, `build` makes, with it.
export GOFLAGS ?= -pgo=off
PY           := .venv/bin/python
VERSION      ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo 0.1.0)
LDFLAGS      := -s -w -X main.version=$(VERSION)
# Where each test target leaves what a failed run is judged by.
OUT          := build/test
# .ci/run sets it: the only tests that may be skipped there.
SKIPS        ?=
TESTSUM      := $(OUT)/testsum $(if $(SKIPS),-skips $(SKIPS))
# scripts/test sets it: the file that holds which tests unit left, by which
# root-test then runs those alone.
AGAIN        ?=
# Root tests change the machine's kernel state, so one package at a time.
ROOT_PKGS     = $(shell grep -rl --include='*_test.go' 'testutil\.Root\b' cmd internal test 2>/dev/null | xargs -rn1 dirname | sort -u | sed 's|^|./|')
CRASH_PKGS    = $(shell grep -rl --include='*_test.go' '^func TestCrash' cmd internal test 2>/dev/null | xargs -rn1 dirname | sort -u | sed 's|^|./|')
FUZZTIME     ?= 30s
MODEL_STEPS  ?= 3000

.DEFAULT_GOAL := help
.PHONY: help setup build generate gen check lint vet s3server unit root-test crash-test model-test python-test test test-guest fuzz bench bench-layers bench-state pgo demo demo-preempt environments \
        sbom deb install clean

help: ## print this
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what the other targets need (Debian 12, root where a package is missing)
	@scripts/setup

generate:
	@$(GO) generate ./internal/chronusbin

build: generate ## build bin/dsec, one static binary with chronus inside
	CGO_ENABLED=0 $(GO) build -pgo=auto -trimpath -ldflags '$(LDFLAGS)' -o bin/dsec ./cmd/dsec

gen: ## regenerate the code made from proto/ (builds buf the first time: minutes)
	$(GO) tool -modfile=tools/go.mod buf generate
	@if [ -x python/scripts/generate.sh ] && [ -x $(PY) ]; then PATH=$(CURDIR)/.venv/bin:$$PATH python/scripts/generate.sh; fi

vet:
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -d $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...

check: setup vet lint ## what review asks first: format, vet, linters, tidy modules, generated code, types
	$(GO) mod tidy -diff
	$(GO) tool -modfile=tools/go.mod buf lint
	$(MAKE) gen && git diff --exit-code --stat -- proto python/src
	$(PY) -m ruff check python demo && $(PY) -m ruff format --check python demo
	cd python && ../$(PY) -m mypy
	$(PY) -m mypy --strict demo/*.py

lint:
	nice $(GO) tool -modfile=tools/lint/go.mod golangci-lint run ./...

# The S3 server that tests run against is not ours; the go command keeps the binary.
s3server:
	@nice $(GO) tool -modfile=tools/s3server/go.mod -n versitygw >/dev/null

$(OUT)/testsum: $(wildcard scripts/testsum/*.go)
	@mkdir -p $(OUT)
	@$(GO) build -o $@ ./scripts/testsum

unit: generate s3server $(OUT)/testsum ## tests that need no root, with the race detector
	@$(if $(AGAIN),rm -f $(AGAIN))
	DSEC_WITHOUT=root $(GO) test -race -json ./... | $(TESTSUM) $(if $(AGAIN),-again $(AGAIN))
	$(GO) test -json ./internal/rawnet | $(TESTSUM) # which is package net under the race detector

root-test: generate s3server $(OUT)/testsum ## tests of the kernel's part: run as root, on a machine of their own
	@if [ "$$(id -u)" != 0 ]; then echo "root-test: not root, not run" >&2; exit 1; fi
	@$(if $(AGAIN),test -s $(AGAIN) || { echo "root-test: unit did not say what it left" >&2; exit 1; })
	DSEC_MUST=root DSEC_LEDGER=machine $(GO) test -p 1 -json -timeout 15m $(if $(AGAIN),-run "$$(cat $(AGAIN))") $(ROOT_PKGS) | $(TESTSUM)

crash-test: generate $(OUT)/testsum ## kill -9 at every step of create and destroy, as root
	DSEC_MUST=root $(GO) test -p 1 -json -timeout 15m -run '^TestCrash' $(CRASH_PKGS) | $(TESTSUM)

model-test: generate ## random lives of sandboxes against a model, MODEL_STEPS (3000) of each seed, as root
	DSEC_MUST=root $(GO) test -p 1 -timeout 2h -v -run 'Model$$' ./internal/edge ./test -model.steps $(MODEL_STEPS)

python-test: build $(OUT)/testsum ## the Python SDK against a real server; as root against containers too
	@scripts/python-test $(SKIPS)

test: setup ## every test there is; as root nothing is left out
	@scripts/test

test-guest: build ## root tests inside a QEMU guest with pure cgroup v2 and AppArmor
	@scripts/guest

fuzz: ## each fuzz target for FUZZTIME (30s)
	@scripts/fuzz $(FUZZTIME)

bench: build ## measure against crun, runc, podman and bubblewrap, as root: bench/RESULTS.md
	@scripts/setup bench
	$(GO) run ./bench

bench-layers: build ## measure layers against tar, mkfs.erofs and podman, as root: bench/LAYERS.md
	@scripts/setup bench
	$(GO) run ./bench/layers

bench-state: build ## measure pauses, jobs and trajectories, as root: bench/STATE.md
	$(GO) run ./bench/state

pgo: build ## profile the server under the bench's load, for the compiler: cmd/dsec/default.pgo
	@rm -rf $(OUT)/profiles && mkdir -p $(OUT)/profiles
	$(GO) run ./bench -rounds 4 -sustain 20 -only C1,C2,X1,F1 -out $(OUT)/profiles -profiles $(OUT)/profiles
	$(GO) tool pprof -proto $(OUT)/profiles/*.pprof > cmd/dsec/default.pgo

demo: setup build ## the main job on real input: three real bugs, 8 attempts each, at once
	@$(PY) demo/demo.py

demo-preempt: setup build ## 64 rollouts that are killed, paused and lose their server, and come to the same end
	@$(PY) demo/preempt.py

environments: setup build ## real environments of Python, Node, Go, Java and C++, and a real task in each: bench/ENVIRONMENTS.md
	@$(PY) demo/environments.py $(ENVIRONMENTS)

sbom: build ## third-party notices and an SPDX bill of materials in dist/
	@$(GO) run ./scripts/sbom bin/dsec dist

deb: sbom ## dist/dsec_VERSION_ARCH.deb
	@packaging/build-deb dist

clean: ## remove what the targets made (not .venv, not .toolchain)
	rm -rf bin build dist internal/chronusbin/bin/chronus internal/chronusbin/bin/chronus-files
