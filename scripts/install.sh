#!/usr/bin/env bash
# Make the virtual environment and install the project into it. Called by the Makefile with PYTHON, VENV and EXTRA set.
set -euo pipefail

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: $PYTHON is not a Python 3.11 or newer; pass PYTHON=python3.13 or the path of one" >&2
    exit 2
}
mkdir -p "$VENV"
exec 9<"$VENV"
flock -n 9 || {
    echo "error: another installation into $VENV is running; wait until it ends" >&2
    exit 1
}
[ -n "$(ls -A "$VENV")" ] || touch "$VENV/made-by-make"
# A killed pip leaves half-unpacked packages, which it would take for installed ones. Then start again, but only in a
# folder that was empty at first: another one also holds what somebody else put there.
clear=
if [ -e "$VENV/installing" ]; then
    echo "the last installation into $VENV was killed; starting again" >&2
    clear=--clear
fi
"$PYTHON" -m venv $clear "$VENV"
if [ -n "$clear" ] || [ -e "$VENV/made-by-make" ]; then touch "$VENV/made-by-make" "$VENV/installing"; fi
# A pip that fails, without the network for example, puts back what it replaced; one that is killed does not.
trap '[ $? -gt 128 ] || rm -f "$VENV/installing"' EXIT
trap 'exit 130' INT TERM HUP

# Python compiles the modules that a run imports. To compile all modules now would take half of the installation time.
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile)
lock=requirements-cpu.lock
[ -z "$EXTRA" ] || lock=requirements-gpu.lock
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$lock")
if [ -n "$EXTRA" ]; then
    # The lock is complete, and leaves out a package that Unsloth lists but that cannot load beside this torch.
    echo "installing PyTorch with CUDA, Unsloth and vLLM: 8.4 GB on disk, several minutes" >&2
    # pip prefers a CPU build of the same version if one of its sources has it.
    "${pip[@]}" --no-deps -r "$lock" "torch==$torch,!=$torch+cpu"
    "${pip[@]}" --no-deps -e .
else
    # A plain version number selects the CUDA build if pip finds both.
    "${pip[@]}" "torch==$torch+cpu" 2>/dev/null || {
        [ $? -le 128 ] || exit 137  # it was killed
        echo "pip finds no CPU build of torch $torch; trying the plain one, which brings CUDA libraries along" >&2
        echo "(to avoid them, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, see pytorch.org, and run this again)" >&2
    }
    "${pip[@]}" -c "$lock" -e ".[dev]"
fi
echo "$EXTRA" >"$VENV/installed"
