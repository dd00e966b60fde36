#!/usr/bin/env bash
# Set up, build every artifact, lint, type-check and test. Needs no GPU; tests that need one skip and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
python=.venv/bin/python
"$python" build_kernels.py --all --jobs 2
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
"$python" -m pytest "$@"
