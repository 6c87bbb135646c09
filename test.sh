#!/usr/bin/env bash
# Installs the test extra, lints, checks types, builds the docs and runs every
# test, on CPU.
#
#   bash test.sh               everything but the tests that take minutes
#   bash test.sh --long        these, too
#   bash test.sh --shard=1/4   the first of four parts
#   bash test.sh --fast        no installing, no docs, no test file that took
#                              more than ten seconds the last time
#
# What else there is goes to pytest: bash test.sh --fast -k tree
set -euo pipefail
cd "$(dirname "$0")"
fast=false
for argument in "$@"; do
  if [[ $argument == --fast ]]; then fast=true; fi
done
if ! $fast; then
  python -m pip install --quiet --editable '.[test]'
  python scripts/install_libtpu.py
fi
ruff check .
ruff format --check .
mypy &
types=$!
if ! $fast; then
  # Anew, because what was read before does not warn again.
  python -m sphinx --fresh-env -W --keep-going --quiet docs build/docs
fi
wait $types
python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@"
