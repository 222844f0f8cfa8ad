#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What can be said about the tree soon: the quick tests leave TensorFlow, and most that starts servers, processes and
# compilers, to `make test`. Runs every check even if one fails, and says at the end which did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
bin=.venv/bin
failed=()

check() {
  local name=$1 began=$SECONDS
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
  printf '   %d s\n' $((SECONDS - began))
}

clang_format() {
  git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' ':!tests/**/golden/**' |
    xargs -r "$bin/clang-format" --dry-run -Werror
}

check 'ruff format' "$bin/ruff" format --check --diff
check 'ruff check' "$bin/ruff" check
check 'mypy' "$bin/mypy"
check 'import contracts' "$bin/lint-imports"
check 'clang-format' clang_format
check 'quick tests' "$bin/python" -m pytest -q -n auto \
  -m 'not tf and not ranks and not heavy and not net and not gpu and not slow'

if ((${#failed[@]})); then
  printf 'failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
