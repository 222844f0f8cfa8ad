#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Horovod for the TensorFlow in .venv, once per machine, and prints the wheel's path.
#
# What is changed in its source, and why, is in horovod_patch.py.
#
# The wheel lies outside the tree, under a name made of everything that it depends on. A build happens in a temporary
# folder, from a pristine source archive (a tree that was built once must not be built again), under a lock, and is
# moved into place whole: two clones may set up at once, and an interrupted build leaves nothing that counts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

version=0.28.1
sdist_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
build_env=(
  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
  HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
  # Headers that its files leave to others to include, which those of g++ 13 and later do not.
  'CXXFLAGS=-include cstdint -include stdexcept -include string'
)
python=$root/.venv/bin/python
patch=$root/tools/horovod_patch.py

recipe=$(cat <(printf '%s\n' "$sdist_sha256" "${build_env[@]}") "$patch" | sha256sum)
facts=$("$python" - <<'PY'
import importlib.metadata, sys, sysconfig
for name in ("tensorflow_cpu", "tensorflow"):
    try:
        tensorflow = f"{name}-{importlib.metadata.version(name)}"
        break
    except importlib.metadata.PackageNotFoundError:
        pass
else:
    sys.exit("set-up: Horovod's wheel needs TensorFlow in .venv. Run `make setup`.")
tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
print(tensorflow, tag, sysconfig.get_platform().replace("-", "_"), sep="-")
PY
)
key=horovod-$version-${recipe:0:12}-$facts
store=$cache/horovod

sound() { [ -f "$1" ] && "$python" -m zipfile -t "$1" >/dev/null 2>&1; }

fetch() {
  printf 'horovod==%s --hash=sha256:%s\n' "$version" "$sdist_sha256" >"$1/requirements.txt" &&
    "$python" -m pip download --no-deps --no-binary horovod --no-build-isolation \
      --require-hashes -r "$1/requirements.txt" -d "$1"
}

patch_source() {
  tar -xzf "$1/horovod-$version.tar.gz" -C "$1" &&
    "$python" "$patch" "$1/horovod-$version"
}

build() {
  # No -march=native here or in Horovod: the wheel serves every machine that sees this cache.
  (cd "$1/horovod-$version" &&
    env "${build_env[@]}" PATH="$root/.venv/bin:$PATH" TMPDIR="$1" \
      "$python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir -w "$1/wheel" .)
}

# One folder per key, because pip reads the wheel's own file name.
find_wheel() { compgen -G "$store/$key/horovod-*.whl" | head -n 1; }

mkdir -p "$store"
wheel=$(find_wheel || true)
if [ -z "$wheel" ] || ! sound "$wheel"; then
  exec 8>"$store/$key.lock"
  if ! flock -n 8; then
    say "another set-up on this machine is building Horovod; waiting for it"
    flock 8
  fi
  wheel=$(find_wheel || true)
  if [ -z "$wheel" ] || ! sound "$wheel"; then
    work=$store/$key.tmp
    rm -rf "$work" "${store:?}/$key"
    mkdir -p "$work"
    step "downloading the source of Horovod $version" fetch "$work"
    step "patching Horovod for TensorFlow 2.21 and slow links" patch_source "$work"
    step "building Horovod $version, about 2 minutes on 2 cores, once per machine" build "$work"
    sound "$(compgen -G "$work/wheel/horovod-*.whl" | head -n 1)" || die "Horovod's build left no sound wheel"
    mv "$work/wheel" "$store/$key"
    rm -rf "$work"
    wheel=$(find_wheel)
  fi
  exec 8>&-
fi
printf '%s\n' "$wheel"
