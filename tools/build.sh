#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the two native libraries with Bazel and puts them, with tf_hips/_build_info.py, where Python finds them.
#
#   TF_HIPS_PYTHON  the interpreter whose TensorFlow is built for (default: .venv/bin/python)
#
# Bazel starts a Java machine and looks at ten thousand headers even when there is nothing to do, so a stamp of all
# inputs (sources, compiler, TensorFlow) decides first. Bazel runs in batch mode: no server process stays behind.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf 'build: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

export TF_HIPS_PYTHON=${TF_HIPS_PYTHON:-$root/.venv/bin/python}
stamp=build/ops.stamp
log=build/bazel.log
info=tf_hips/_build_info.py
libraries=(tf_hips/ops/_tf_hips_ops.so tf_hips/ops/libtf_hips_native.so)

[ -x "$TF_HIPS_PYTHON" ] || die "no Python at $TF_HIPS_PYTHON; run \`make setup\`"
command -v g++ >/dev/null || die "g++ is missing; run \`make setup\`, or: apt-get install g++"
bazel=$(command -v bazel-4 || command -v bazel) ||
  die "bazel is missing; run \`make setup\`, or: apt-get install bazel-bootstrap bazel-rules-java"
[ -d /usr/share/bazel/rules/java ] ||
  die "Bazel's Java rules are missing; run \`make setup\`, or: apt-get install bazel-rules-java"

mkdir -p build
exec 9>build/ops.lock # two builds in one tree take turns
flock 9

# The version from the wheel's metadata: importing TensorFlow takes seconds. A path without a version is no TensorFlow.
TF_HIPS_TENSORFLOW=$("$TF_HIPS_PYTHON" -I - <<'PY'
from importlib import metadata
from importlib.util import find_spec

spec = find_spec("tensorflow")
names = metadata.packages_distributions().get("tensorflow", []) if spec else []
print(*sorted({f"{name}=={metadata.version(name)}" for name in names}), spec.origin if spec else "")
PY
)
export TF_HIPS_TENSORFLOW
case $TF_HIPS_TENSORFLOW in
  *==*) ;;
  *) die "$TF_HIPS_PYTHON has no TensorFlow; run \`make setup\`" ;;
esac
compiler=$(g++ --version | head -n 1)
# Made by tools/build_cuda.py, which says so in $info; of older sources it must not stay.
cuda=tf_hips/ops/libtf_hips_cuda.so

inputs() {
  printf '%s\n' "$TF_HIPS_PYTHON" "$TF_HIPS_TENSORFLOW" "$compiler"
  find WORKSPACE BUILD .bazelrc tools/build.sh compll tf_hips/cc tf_hips/ops/BUILD tf_hips/ops/specs \
    -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}
now=$(inputs | sha256sum | cut -d ' ' -f 1)

up_to_date=yes
for file in "${libraries[@]}" "$info"; do
  [ -f "$file" ] || up_to_date=
done
if [ "$up_to_date" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then
  say "the libraries are up to date"
  exit 0
fi

say "building the libraries for ${TF_HIPS_TENSORFLOW%% *} (Bazel; one to two minutes from nothing)"
began=$SECONDS
rm -f "$stamp" "$cuda"
# 9>&-: the lock must not outlive this script in a process that Bazel left.
if ! "$bazel" --batch build //:ops //:native >"$log" 2>&1 9>&-; then
  say "failed after $((SECONDS - began)) s; all of it is in $log:"
  grep -v -e '^OpenJDK ' -e '^INFO: ' "$log" | head -n 60 | cut -c 1-400 | sed 's/^/  | /' >&2
  exit 1
fi

# Renamed into place, so that a process that has the old file mapped keeps it whole.
for file in "${libraries[@]}"; do
  install -m 755 "build/bazel-bin/$file" "$file.new"
  mv -f "$file.new" "$file"
done
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
cat >"$info.new" <<PY
# SPDX-License-Identifier: Apache-2.0
"""What the native libraries were built with. Written by tools/build.sh, unknown to git."""

TENSORFLOW = "$(sed -E 's/^[^=]*==([^ ]*).*/\1/' <<<"$TF_HIPS_TENSORFLOW")"
COMPILER = "$compiler"
CUDA = "not compiled"
GIT_COMMIT = "$commit"
PY
mv -f "$info.new" "$info"
printf '%s\n' "$now" >"$stamp"
say "wrote ${libraries[*]##*/} to tf_hips/ops in $((SECONDS - began)) s"
