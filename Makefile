# cgpu. `make help` lists the targets; CI calls the same ones.

CARGO  ?= cargo
PREFIX ?= /usr
ETC    ?= /etc
DESTDIR ?=
MINUTES ?= 60
WORKERS ?= 8
SEED    ?=

RELEASE := target/release
# Called at every start of a container: static, they start a quarter of a millisecond sooner.
STATIC  := cgpu-runtime cgpu-hook cgpu-monitor
IN_IMAGE := cgpu-node-setup cgpu-scheduler-extender

.DEFAULT_GOAL := help
.PHONY: help deps build core sim nextest check test test-all test-programs soak gpu gpu-programs demo pictures bench fmt lint deny typos fuzz install uninstall pages image manifests packages test-packages test-host test-engines test-kubernetes prepush

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what tests and demo need (Debian and Ubuntu, root)
	@tests/deps

build: core ## build the programs for release, in target/release
	$(CARGO) build --release --locked -p cgpu-smi -p cgpu-metrics -p cgpu-tree -p cgpu-k8s \
		--bin cgpu-smi --bin cgpu-metrics --bin cgpu-tree --bin cgpu-device-plugin \
		--bin cgpu-dra-driver --bin kubectl-inspect-gpushare

# What containers are made with: the demo needs no more.
core:
	$(CARGO) build --release --locked -p cgpu-cli --bin cgpu
	@for program in $(STATIC); do \
		echo "$(CARGO) rustc --release --locked --bin $$program -- -C target-feature=+crt-static"; \
		$(CARGO) rustc --release --locked --bin $$program -- -C target-feature=+crt-static \
			|| $(CARGO) build --release --locked --bin $$program || exit 1; \
	done

sim:
	$(CARGO) build --release --locked -p cgpu-sim --bin cgpu-sim
	$(CARGO) rustc --release --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static

# Each test is a process of its own, and many run at once (.config/nextest.toml). They run as they were built: cargo would put
# an rmtool in the place of the static one. The speed of nextest is none of the tests': it is built in a minute or two less.
BUILT   := target/nextest
NEXTEST := $(CARGO) nextest run --cargo-metadata $(BUILT)/cargo.json --binaries-metadata $(BUILT)/binaries.json
nextest:
	@command -v cargo-nextest >/dev/null || CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off \
		CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false \
		$(CARGO) install --locked --no-default-features --features default-no-update cargo-nextest@0.9.151

check: ## what to run first: format, clippy, and the libraries' tests; needs no privilege and no engine
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --locked --workspace -- -D warnings
	$(CARGO) test --locked --lib -p cgpu -p cgpu-cli -p cgpu-monitor -p cgpu-inject -p cgpu-host -p cgpu-core -p nvrm

# Half a minute is what a test waits for anything, where nothing else runs.
test test-all: export CGPU_TEST_PATIENCE ?= 4

test: test-programs ## test all that an ordinary change can break, real engines included (root)
	$(NEXTEST)

test-all: test-programs ## test everything: also what repeats `test` over other runtimes and older images (root)
	$(NEXTEST) --profile all

test-programs: deps nextest
	$(CARGO) build --locked --workspace --bins
	@mkdir -p $(BUILT)
	$(CARGO) metadata --locked --format-version 1 > $(BUILT)/cargo.json
	$(CARGO) nextest list --locked --workspace --list-type binaries-only --message-format json > $(BUILT)/binaries.json
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static

# The programs of the tests, with all their assertions.
soak: deps ## kill at random for MINUTES=60 with WORKERS=8 and a SEED; judged, counted (root)
	$(CARGO) build --locked --workspace --bins
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	$(CARGO) test --locked --test soak -- --minutes $(MINUTES) --workers $(WORKERS) \
		$(if $(SEED),--seed $(SEED))

gpu-programs: build ## build all that tests/gpu/run needs, to be carried to a machine with a GPU
	$(CARGO) rustc --release --locked -p cgpu-record --bin cgpu-record -- -C target-feature=+crt-static
	$(CARGO) rustc --release --locked -p cgpu-record --bin cgpu-steer -- -C target-feature=+crt-static
	$(CARGO) rustc --release --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	@mkdir -p $(RELEASE)/gpu
	@for program in alloc spin latency; do \
		$(CC) -O2 -Wall -Wextra -o $(RELEASE)/gpu/$$program tests/gpu/programs/$$program.c -ldl || exit 1; \
	done

gpu: gpu-programs ## ask the GPU of this machine what is promised of it; one table (root)
	@tests/gpu/run

# Built as the tests are: what is linked for release takes three times as long to build.
demo: deps ## two containers share a simulated GPU, within their quotas (root)
	$(CARGO) build --locked -p cgpu -p cgpu-cli -p cgpu-sim --bins
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	@tests/demo target/debug

pictures: deps build sim ## make the pictures of the documents anew, the session by real commands (root)
	@touch target/smi.txt
	docs/pictures/session $(RELEASE) target/smi.txt > target/session.txt
	$(CARGO) bench --locked --bench compute -- --plots $(CURDIR)/target/policies.json
	docs/pictures/draw target/session.txt target/smi.txt --policies target/policies.json

# Cargo links the programs again for the bench, and not statically. The second has its figures
# from rmtool, and need not be fast itself.
bench: deps build sim ## measure what we cost beside bare runc (root)
	@mkdir -p target/bench && cp $(addprefix $(RELEASE)/,cgpu cgpu-smi cgpu-metrics cgpu-tree $(STATIC) cgpu-sim rmtool) target/bench/
	CGPU_BIN_DIR=$(CURDIR)/target/bench $(CARGO) bench --locked --bench cost
	CGPU_BIN_DIR=$(CURDIR)/target/bench $(CARGO) bench --locked --profile dev --bench driver
	CGPU_BIN_DIR=$(CURDIR)/target/bench $(CARGO) bench --locked --profile dev --bench look
	CGPU_BIN_DIR=$(CURDIR)/target/bench $(CARGO) bench --locked --profile dev --bench neighbour
	$(CARGO) bench --locked --bench compute
	$(CARGO) bench --locked -p cgpu-k8s --bench extender

fmt: ## format the code
	$(CARGO) fmt --all

lint: ## check format, clippy, the comments' links, and that the fuzz targets build (a C++ compiler)
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D rustdoc::broken_intra_doc_links" $(CARGO) doc --locked --no-deps --workspace --document-private-items
	$(CARGO) check --locked --manifest-path fuzz/Cargo.toml

deny: ## check licences, bans and sources of dependencies, and advisories where they can be had
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --locked --all-features check licenses bans sources
	@if $(CARGO) deny fetch db >/dev/null 2>&1; then $(CARGO) deny --locked check advisories; \
	else echo "skipped: advisories, their database can't be reached"; fi

typos: ## look for misspellings
	@command -v typos >/dev/null || $(CARGO) install --locked typos-cli
	typos

fuzz: ## fuzz each target for half a minute (cargo-fuzz and a nightly toolchain)
	@command -v cargo-fuzz >/dev/null || $(CARGO) install --locked cargo-fuzz
	@for target in $$(cd fuzz && ls fuzz_targets | sed 's/\.rs$$//'); do \
		$(CARGO) +nightly fuzz run $$target -- -max_total_time=30 || exit 1; \
	done

# They are the same whatever they are built for, and sooner so.
PAGES   := target/debug/cgpu-pages
pages:
	$(CARGO) build --locked -p cgpu-pages

install: build pages ## install into DESTDIR/PREFIX
	packaging/stage $(RELEASE) $(PAGES) "$(DESTDIR)" $(PREFIX) $(ETC)
	test -n "$(DESTDIR)" || test "$(PREFIX)" != /usr || ! test -d /run/systemd/system || systemctl enable --now cgpu-nodes.service

uninstall: ## remove what install installed, but for the configuration
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,cgpu cgpu-smi cgpu-metrics cgpu-tree cgpu-device-plugin cgpu-dra-driver kubectl-inspect-gpushare cgpu-runtime cgpu-hook cgpu-monitor)
	rm -rf $(DESTDIR)$(PREFIX)/share/cgpu $(DESTDIR)$(PREFIX)/share/doc/cgpu
	rm -f $(DESTDIR)$(PREFIX)/share/man/man8/cgpu.8 $(DESTDIR)$(PREFIX)/share/man/man8/cgpu-*.8 $(DESTDIR)$(PREFIX)/share/man/man8/kubectl-inspect-gpushare.8
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/share/,$(foreach program,cgpu cgpu-smi cgpu-metrics cgpu-tree cgpu-device-plugin cgpu-dra-driver kubectl-inspect-gpushare,\
		bash-completion/completions/$(program) zsh/vendor-completions/_$(program) \
		fish/vendor_completions.d/$(program).fish))
	test -n "$(DESTDIR)" || ! test -d /run/systemd/system || systemctl disable cgpu-nodes.service || true
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/lib/systemd/system/,cgpu-nodes.service cgpu-view.service cgpu-metrics.service cgpu-tree.service cgpu-device-plugin.service)
	test -n "$(DESTDIR)" || ! mountpoint -q /run/cgpu/driver || umount -R /run/cgpu/driver

# The image has no libraries: what runs in it itself is linked statically.
IMAGE ?= localhost/cgpu:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
ENGINE ?= $(shell command -v podman || command -v docker)
image: build ## build the image of cgpu's pods in Kubernetes (IMAGE=…, ENGINE=podman or docker)
	@for program in $(IN_IMAGE); do \
		$(CARGO) rustc --release --locked -p cgpu-k8s --bin $$program -- -C target-feature=+crt-static || exit 1; \
	done
	packaging/kubernetes/image $(RELEASE) target/image
	@test -n "$(ENGINE)" || { echo "make image: neither podman nor docker is here; ENGINE=PROGRAM names another" >&2; exit 1; }
	$(ENGINE) build -f target/image/Containerfile -t $(IMAGE) target/image

# The same as the chart, with its defaults.
manifests:
	$$(tests/kubernetes/helm) template cgpu packaging/kubernetes/chart --namespace kube-system > target/cgpu.yaml
	mv target/cgpu.yaml packaging/kubernetes/cgpu.yaml

packages: build pages ## make a .deb, an .rpm and a tarball, in target/packages
	packaging/build $(RELEASE) $(PAGES)

test-packages: packages ## install, upgrade, remove and purge them in fresh userlands of Debian and Ubuntu (root)
	$(CARGO) build --locked -p cgpu-sim --bin cgpu-sim
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	tests/packages target/packages target/debug

test-host: packages ## install the .deb in virtual machines of Debian 12 and 13, with systemd and docker (root, qemu)
	$(CARGO) build --locked -p cgpu-sim --bin cgpu-sim
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	CGPU_VM_SUITE=bookworm tests/vm --script tests/fresh-host
	CGPU_VM_SUITE=trixie tests/vm --script tests/fresh-host

test-engines: test-programs ## test with the engines of Debian 13 and of Debian's next release, in userlands of theirs (root)
	tests/engines-of

# Kubernetes is built once, and kept outside this directory (tests/kubernetes/build).
test-kubernetes: deps ## run pods in a real Kubernetes on this machine, over simulated GPUs (root)
	@tests/deps tests/kubernetes/packages.txt
	$(CARGO) build --locked --workspace --bins
	$(CARGO) rustc --locked -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static
	@for program in $(IN_IMAGE); do \
		$(CARGO) rustc --locked -p cgpu-k8s --bin $$program -- -C target-feature=+crt-static || exit 1; \
	done
	tests/kubernetes/run target/debug
	tests/kubernetes/claims target/debug

prepush: lint test-all deny ## what CI does, and more
