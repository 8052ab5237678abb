#!/usr/bin/env bash
# Makes the virtual environment and installs what pyproject.toml asks for, at the tested versions.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(f"Python >= 3.11 is needed, this is {sys.version}" if sys.version_info < (3, 11) else 0)'
# An environment without pip is left behind where the package python3-venv was missing.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# Torch first and by itself. TORCH_INDEX_URL may name an index with smaller, CPU-only builds.
pip install --quiet -c constraints.txt torch ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
pip install --quiet -c constraints.txt 'scikit-build-core' pybind11 cmake ninja
"$VENV/bin/python" - >"$VENV/requirements.txt" <<'PY'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"]["dev"]]))
PY
pip install --quiet -c constraints.txt -r "$VENV/requirements.txt"
