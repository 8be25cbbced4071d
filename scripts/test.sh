#!/usr/bin/env bash
# Check style and run the tests:   bash scripts/test.sh [words for pytest]
# Examples: bash scripts/test.sh -m "not slow"     bash scripts/test.sh tests/models
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$REPO_ROOT"

use_environment requirements.txt requirements-dev.txt
say "style: ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
say "tests: pytest"
# One process per core with one thread each: two processes with two threads would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest -q --durations=15 -n "$(env -u OMP_NUM_THREADS nproc)" --dist loadfile "$@"
