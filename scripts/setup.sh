#!/bin/sh
# Everything `make` needs, from a bare clone: .venv, pinned dependencies, Chromium. Once done, a rerun
# only compares a stamp. Runs as root or not; what cannot be done here is said in one line.
#
#   PYTHON    the interpreter to build .venv with (default: the newest of 3.14 .. 3.11 that can)
#   TORCH     what to install in place of the pinned torch, e.g. another build: TORCH="torch==2.13.0+cpu"
#   PIP_ARGS  further arguments of `pip install`
set -eu
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/holotron-setup
EXTRAS=dev,serve

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The stamp holds a checksum of all that decides what is installed, then the path of Chromium.
wanted=$( { cat pyproject.toml constraints.txt scripts/setup.sh
            printf '%s|' "$PWD" "${TORCH:-}" "${PIP_ARGS:-}" "${PYTHON:-}" "${HOLOTRON_CHROMIUM:-}"; } | cksum)
if [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ -x "$VENV/bin/holotron" ]; then
    { read -r done_for; read -r chromium; } <"$STAMP" || true
    if [ "$done_for" = "$wanted" ] && [ -x "${chromium:-}" ]; then exit 0; fi
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_venv() {
    if [ -z "${PYTHON:-}" ] && new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip -V >/dev/null 2>&1; then
        return
    fi
    for name in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3}; do
        command -v "$name" >/dev/null 2>&1 || continue
        new_enough "$name" || continue
        say "making $VENV with $name ($("$name" -V 2>&1))"
        # A distribution may ship an interpreter without ensurepip: then the next name is tried.
        if "$name" -m venv --clear "$VENV" >/dev/null 2>&1; then return; fi
        say "$name cannot make a virtual environment"
    done
    die "no usable Python >= 3.11 with venv (${PYTHON:-python3.14 .. python3.11, python3}); on Debian type:" \
        "apt-get install python3 python3-venv; or name one: make setup PYTHON=/path/to/python3"
}

install_packages() {
    say "installing dependencies (constraints.txt); the first time this takes minutes"
    cp constraints.txt "$VENV/constraints.txt"
    if [ -n "${TORCH:-}" ]; then
        grep -v '^torch==' constraints.txt >"$VENV/constraints.txt"
        pip_install "$TORCH"
    elif [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then
        say "no NVIDIA GPU here; if pip fetches torch with CUDA, README (\"A smaller torch\") names the way around"
    fi
    pip_install -e ".[$EXTRAS]"
}

pip_install() {
    quiet=--quiet
    if [ -t 2 ]; then quiet=; fi # somebody is watching: show that the download moves
    # Both are meant to split into words.
    # shellcheck disable=SC2086
    "$VENV/bin/python" -m pip install $quiet --disable-pip-version-check \
        -c "$VENV/constraints.txt" ${PIP_ARGS:-} "$@" ||
        die "pip could not install $*; the lines above say why. After mending it, type the same make command again"
}

find_chromium() { "$VENV/bin/python" -m holotron.computer.chromium; }

get_chromium() {
    if find_chromium 2>/dev/null; then return; fi
    # A browser that was named but does not start is the user's to correct.
    if [ -n "${HOLOTRON_CHROMIUM:-}" ]; then find_chromium; return; fi
    say "no Chromium found; asking Playwright for one"
    # Root can mend what refused: libraries that a downloaded one lacks, or the download itself.
    mend="apt-get install -y --no-install-recommends chromium"
    if "$VENV/bin/python" -m playwright install chromium >"$VENV/chromium.log" 2>&1; then
        mend="$VENV/bin/python -m playwright install-deps chromium"
        if find_chromium 2>/dev/null; then return; fi
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "Playwright's did not come or does not start ($VENV/chromium.log); trying: $mend"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update && $mend; } >>"$VENV/chromium.log" 2>&1 </dev/null || true
    fi
    find_chromium
}

build_kernels() {
    "$VENV/bin/python" -m holotron.model.kernels >&2 ||
        say "going on without C++ kernels: all works, training and many agents at half the speed"
}

rm -f "$STAMP"
make_venv
install_packages
build_kernels
chromium=$(get_chromium) || exit 1
printf '%s\n%s\n' "$wanted" "$chromium" >"$STAMP"
say "ready: $("$VENV/bin/python" -V), $chromium"
