#!/usr/bin/env bash
# Make the virtual environment and install the project into it. Called by the Makefile with PYTHON, VENV and EXTRA set.
set -euo pipefail

command -v "$PYTHON" >/dev/null || {
    echo "error: $PYTHON is not installed; pass PYTHON=python3.12 or the path of a Python 3.11 or 3.12" >&2
    exit 2
}
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "error: $PYTHON is $("$PYTHON" --version), the pinned packages need Python 3.11 or 3.12; pass PYTHON=python3.12" >&2
    exit 2
}
mkdir -p "$VENV"
exec 9<"$VENV"
# Other exit codes of flock mean that this file system has no such locks.
flock -n -E 75 9 2>/dev/null || [ $? -ne 75 ] || {
    echo "error: another installation into $VENV is running; wait until it ends" >&2
    exit 1
}
# Only a folder that was empty is ever emptied again.
[ -n "$(ls -A "$VENV")" ] || touch "$VENV/made-by-make"
# `installing` becomes `installed` at the end. If it is still there, an installation was killed, and pip would take
# half-unpacked packages for installed ones.
before=
if [ -e "$VENV/installing" ]; then
    [ -e "$VENV/made-by-make" ] || {
        echo "error: an installation into $VENV was killed, and the folder also holds other files; pass VENV=NEW_FOLDER, or delete $VENV/installing to keep what is there" >&2
        exit 2
    }
    echo "the last installation into $VENV was killed; starting again" >&2
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name installing ! -name made-by-make -exec rm -rf {} +
elif [ -e "$VENV/installed" ]; then
    before=installed
    mv "$VENV/installed" "$VENV/installing"
else
    touch "$VENV/installing"
fi
# When pip fails, without the network for example, it puts back what it replaced. When it is killed or interrupted, it
# does not, and exits with 1 after Ctrl-C.
failed() {
    [ $? -le 128 ] && [ -e "$VENV/installing" ] || return 0
    if [ -n "$before" ]; then mv "$VENV/installing" "$VENV/installed"; else rm "$VENV/installing"; fi
}
trap failed EXIT
trap 'exit 130' INT TERM HUP
"$PYTHON" -m venv "$VENV"
# Python compiles the modules that a run imports. To compile all modules now would take half of the installation time.
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
torch=$(sed -n 's/^ *"torch==\([^"]*\)",/\1/p' pyproject.toml)
if [ -n "$EXTRA" ]; then
    # The lock is complete, and leaves out a package that Unsloth lists but that cannot load beside this torch.
    echo "installing PyTorch with CUDA, Unsloth and vLLM: 8.4 GB on disk, several minutes" >&2
    # pip prefers a CPU build of the same version if one of its sources has it.
    "${pip[@]}" install --no-compile --no-deps -r requirements-gpu.lock "torch==$torch,!=$torch+cpu"
    "${pip[@]}" install --no-compile --no-deps -e .
else
    code=0
    message=$("${pip[@]}" install --no-compile "torch==$torch+cpu" 2>&1) || code=$?
    if [[ $message == *"No matching distribution"* && $message != *"(from versions: none)"* ]]; then
        echo "no CPU build of torch $torch in pip's sources; taking the plain one, which brings CUDA libraries along" >&2
        echo "(to avoid them, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, see pytorch.org, and run this again)" >&2
    elif [ $code -ne 0 ]; then  # no version at all: the sources cannot be reached
        echo "$message" >&2
        exit $code
    fi
    "${pip[@]}" install --no-compile -e ".[dev]"
fi
echo "$EXTRA" >"$VENV/installing"
mv "$VENV/installing" "$VENV/installed"
