# make demo  - everything from nothing to the demo's table
# make test  - every test, as root
# The other targets are parts of these two.

SHELL := /bin/bash
.DELETE_ON_ERROR:
export CGO_ENABLED ?= 0
export GOFLAGS := -buildvcs=auto

PACKAGES := mmdebstrap busybox-static dash erofs-utils e2fsprogs zstd xz-utils git gcc libc6-dev
GO_FILES := $(shell git ls-files '*.go' '*.s' '*.proto' go.mod go.sum 2>/dev/null)
STATE := .demo

.PHONY: demo test build lint generate check bench clean packages

# The guest is a program of its own, as small as can be, carried inside dsec. The older collector
# touches fewer pages of each span: 44 KiB less in every sandbox.
internal/guest/bin/dsec-guest: $(GO_FILES)
	GOEXPERIMENT=nogreenteagc go build -trimpath -ldflags '-s -w' -o $@ ./cmd/dsec-guest

bin/dsec: internal/guest/bin/dsec-guest $(GO_FILES)
	go build -trimpath -ldflags '-s -w' -o $@ ./cmd/dsec

build: bin/dsec

# Debian packages, by name, only where one is missing.
packages:
	@missing=(); for p in $(PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing+=($$p); done; \
	if [ $${#missing[@]} -gt 0 ]; then echo "installing $${missing[*]}"; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${missing[@]} >/dev/null; fi

demo: packages
	@test/demo.sh $(STATE)

test: packages internal/guest/bin/dsec-guest
	test/run.sh

lint:
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "not gofmt-ed: $$out"; exit 1; }
	go vet ./...
	go tool staticcheck ./...

# Generated code that is committed; check fails if it is not up to date.
generate:
	go generate ./...

check: lint
	@go mod tidy -diff
	@$(MAKE) --no-print-directory generate && git diff --exit-code -- aether/msg docs/openapi.json

clean:
	rm -rf bin $(STATE) internal/guest/bin/dsec-guest
