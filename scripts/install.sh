#!/usr/bin/env bash
# Make the virtual environment and install the project into it. Called by the Makefile with PYTHON, VENV and EXTRA set.
set -euo pipefail

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "error: $PYTHON is $("$PYTHON" --version), the pinned packages need Python 3.11 or 3.12; pass PYTHON=python3.12" >&2
    exit 2
}
"$PYTHON" -m venv "$VENV"
# Python compiles the modules that a run imports. To compile all modules now would take half of the installation time.
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
torch=$(sed -n 's/^ *"torch==\([^"]*\)",/\1/p' pyproject.toml)
if [ -z "$EXTRA" ] && ! "${pip[@]}" install --no-compile "torch==$torch+cpu" 2>/dev/null; then
    echo "no CPU build of torch $torch in pip's sources; taking the plain one, which brings CUDA libraries along" >&2
    echo "(to avoid them, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, see pytorch.org, and run this again)" >&2
fi
"${pip[@]}" install --no-compile -e ".[dev$EXTRA]"
touch "$VENV/installed"
