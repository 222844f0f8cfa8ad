# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts beside it: one line per step, everything else into a log whose tail is shown on failure.
#
# The log lies in build/, which git ignores and `make clean` empties.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log_file=$root/build/setup.log
cache=${TF_HIPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tf_hips}

say() { printf 'set-up: %s\n' "$*" >&2; }

die() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

# step WHAT COMMAND...: runs the command quietly; says what is done before it, and the seconds if it took many.
# Locks stay open in the command, so that one that outlives a killed script still keeps others out.
step() {
  local what=$1 began=$SECONDS
  shift
  say "$what"
  mkdir -p "${log_file%/*}"
  printf '\n== %s: %s\n' "$(date -u +%FT%TZ)" "$what" >>"$log_file"
  if ! "$@" >>"$log_file" 2>&1; then
    say "failed after $((SECONDS - began)) s: $what. The end of build/setup.log:"
    tail -n 25 "$log_file" | sed 's/^/  | /' >&2
    exit 1
  fi
  if ((SECONDS - began >= 5)); then say "  done in $((SECONDS - began)) s"; fi
}
