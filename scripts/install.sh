#!/usr/bin/env bash
# Make the virtual environment and install the project into it. Called by the Makefile with PYTHON, VENV and EXTRA set.
set -euo pipefail

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "error: $PYTHON is $("$PYTHON" --version), the pinned packages need Python 3.11 or 3.12; pass PYTHON=python3.12" >&2
    exit 2
}
# `installing` becomes `installed` at the end. If it is still there, an installation was interrupted, and pip would
# take half-unpacked packages for installed ones.
mkdir -p "$VENV"
if [ -e "$VENV/installing" ]; then
    echo "the last installation into $VENV did not finish; starting again" >&2
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name installing -exec rm -rf {} +
elif [ -e "$VENV/installed" ]; then
    mv "$VENV/installed" "$VENV/installing"
else
    touch "$VENV/installing"
fi
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
    if ! "${pip[@]}" install --no-compile "torch==$torch+cpu" 2>/dev/null; then
        echo "no CPU build of torch $torch in pip's sources; taking the plain one, which brings CUDA libraries along" >&2
        echo "(to avoid them, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, see pytorch.org, and run this again)" >&2
    fi
    "${pip[@]}" install --no-compile -e ".[dev]"
fi
touch "$VENV/installing"
mv "$VENV/installing" "$VENV/installed"
