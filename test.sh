#!/usr/bin/env bash
# Installs the test extra, lints, checks types and runs every test, on CPU.
set -euo pipefail
cd "$(dirname "$0")"
python -m pip install --quiet --editable '.[test]'
python scripts/install_libtpu.py
ruff check .
ruff format --check .
mypy
python -m pytest --numprocesses=2 --dist=worksteal "$@"
