#!/usr/bin/env bash
# Make .venv with everything that building, testing and linting need. Quick when nothing has changed.
#   PYTHON=python3.12 scripts/setup.sh      chooses the interpreter of a new .venv (3.10 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch==2.13.0"  # any build will do, with CUDA or without: the tests that need no GPU use it as a calculator
python=${PYTHON:-python3}

if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup: $python is $("$python" --version), Python 3.10 or newer is needed; set PYTHON=" >&2
    exit 1
  }
  "$python" -m venv .venv
fi

stamp=.venv/setup-stamp
wanted=$(cat pyproject.toml scripts/setup.sh)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

mkdir -p artifacts  # a package folder of the project, empty until the first build
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
.venv/bin/python -c 'import torch' 2>/dev/null || "${pip[@]}" "$torch"
"${pip[@]}" --editable '.[build,test,verify,dev]'
printf '%s\n' "$wanted" >"$stamp"
