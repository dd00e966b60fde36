#!/usr/bin/env bash
# Set up and run the main job: build the lead entry, check it, and launch it where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
exec .venv/bin/python scripts/main_job.py "$@"
