#!/usr/bin/env bash
# Install the project and what it needs with PYTHON into the virtual environment VENV, which is made if necessary. Called
# by the Makefile and by the notebook.
# EXTRA: `,gpu` for CUDA 13, Unsloth and vLLM; `vllm` for CUDA 13 and a newer vLLM, without Unsloth; `cuda12` for
# PyTorch's CUDA 12 build, PEFT only; empty for the CPU; `floor` for the lowest versions that pyproject.toml allows, on the
# CPU; `newest` for what pip chooses without a lock; `auto` for `,gpu`, `cuda12` or the CPU, what the driver runs.
# ANY_DRIVER: also install if the NVIDIA driver is too old.
# UV: the program uv, which installs in place of pip; empty for pip. The default is the uv on the PATH, if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV-$(command -v uv || true)}
# `uv venv --clear` came with uv 0.8; the other flags are older.
if [ -n "$UV" ] && [[ "$("$UV" venv --help 2>&1)" != *--clear* ]]; then
    echo "$UV is no uv of version 0.8 or newer; installing with pip" >&2
    UV=
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: $PYTHON is not a Python 3.11 or newer; pass PYTHON=python3.13 or the path of one" >&2
    exit 2
}
[ "$EXTRA" != auto ] || EXTRA=$("$PYTHON" lora_grpo/hardware/nvidia.py)
case "$EXTRA" in
*gpu) lock=requirements-gpu.lock engines="Unsloth and vLLM" size=8.4;;
*vllm) lock=requirements-vllm.lock engines=vLLM size=9.6;;
cuda12) lock=requirements-cpu.lock build=cu126 cuda=12;;
"") lock=requirements-cpu.lock build=cpu cuda=0;;
floor) lock=requirements-floor.lock build=cpu cuda=0;;
newest) lock=/dev/null cuda=0;;
*) echo "error: EXTRA=$EXTRA is unknown; pass EXTRA=,gpu, EXTRA=vllm, EXTRA=cuda12 or EXTRA= for the CPU" >&2; exit 2;;
esac
if [ -n "${engines-}" ]; then
    # Lines for other platforms, which may name another version, come after the one for Linux.
    cuda=$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\).*/\1/p' "$lock" | head -n 1)
fi
[ -n "${ANY_DRIVER-}" ] || "$PYTHON" lora_grpo/hardware/nvidia.py "$cuda" || exit 2

mkdir -p "$VENV"
exec 9<"$VENV"
flock -n 9 || {
    echo "error: another installation into $VENV is running; wait until it ends" >&2
    exit 1
}
[ -n "$(ls -A "$VENV")" ] || touch "$VENV/made-by-make"
# A killed installer leaves half-unpacked packages, which it would take for installed ones. Then start again, but only
# in a folder that was empty at first: another one also holds what somebody else put there.
clear=
if [ -e "$VENV/installing" ]; then
    echo "the last installation into $VENV was killed; starting again" >&2
    clear=--clear
fi
# Colab's Python has no ensurepip, nor has Debian's without python3-venv. Then its own pip brings one. With uv, the
# environment gets pip as well, for what is installed into it later.
if [ -n "$UV" ]; then
    "$UV" venv --quiet --seed --python "$PYTHON" ${clear:---allow-existing} "$VENV"
elif "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    "$PYTHON" -m venv $clear "$VENV"
else
    "$PYTHON" -m venv --without-pip $clear "$VENV"
    "$PYTHON" -m pip --disable-pip-version-check --quiet --python "$VENV/bin/python" install pip
fi
if [ -n "$clear" ] || [ -e "$VENV/made-by-make" ]; then touch "$VENV/made-by-make" "$VENV/installing"; fi
# An installer that fails, without the network for example, changes nothing; one that is killed does.
trap '[ $? -gt 128 ] || rm -f "$VENV/installing"' EXIT
trap 'exit 130' INT TERM HUP
PYTHON=$VENV/bin/python

# Python compiles the modules that a run imports. To compile all modules now would take half of the installation time.
pip=("$PYTHON" -m pip --disable-pip-version-check --quiet install --no-compile)
newest=(--upgrade --upgrade-strategy eager)
if [ -n "$UV" ]; then
    pip=("$UV" pip install --quiet --python "$PYTHON")
    newest=(--upgrade)
fi
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$lock")
skip='^#'
# The CPU lock names the libraries of CUDA 13; PyTorch's CUDA 12 build brings its own.
[ "$EXTRA" != cuda12 ] || skip="$skip|^(cuda|nvidia)-"
if [ -n "${engines-}" ]; then
    # The lock is complete, and leaves out a package that Unsloth lists but that cannot load beside this torch.
    echo "installing PyTorch with CUDA, $engines: $size GB on disk, several minutes" >&2
    # pip prefers a CPU build of the same version if one of its sources has it.
    "${pip[@]}" --no-deps -r <(grep -Ev "$skip" "$lock") "torch==$torch,!=$torch+cpu"
    "${pip[@]}" --no-deps -e .
elif [ "$EXTRA" = newest ]; then
    "${pip[@]}" "${newest[@]}" -e ".[dev]"
else
    # A plain version number selects the CUDA 13 build if pip finds several. uv also knows PyTorch's own indexes.
    code=0
    "${pip[@]}" "torch==$torch+$build" 2>/dev/null || code=$?
    if [ $code != 0 ] && [ $code -le 128 ] && [ -n "$UV" ]; then
        code=0
        "${pip[@]}" --torch-backend "$build" "torch==$torch" 2>/dev/null || code=$?
    fi
    [ $code -le 128 ] || exit 137  # it was killed
    if [ $code != 0 ]; then
        index="set PIP_EXTRA_INDEX_URL to PyTorch's $build index, see pytorch.org, and run this again"
        [ -z "$UV" ] || index="make sure that PyTorch's $build index, see pytorch.org, can be reached, and run this again"
        [ "$build" = cpu ] || { echo "error: found no torch $torch+$build; $index" >&2; exit 1; }
        echo "found no CPU build of torch $torch; trying the plain one, which brings CUDA libraries along" >&2
        echo "(to avoid them, $index)" >&2
    fi
    "${pip[@]}" -c <(grep -Ev "$skip" "$lock") -e ".[dev]"
fi
echo "$EXTRA" >"$VENV/installed"
