#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up everything that a clean clone needs to build, test and run: Debian's tools, .venv, the patched Horovod.
#
#   PYTHON         interpreter for .venv (default: the one .venv has, else python3)
#   TF_HIPS_CACHE  where Horovod's wheel is kept (default: ~/.cache/tf_hips)
#   --quiet        say nothing when there is nothing to do
#
# Safe to run at any time: what is up to date is left alone, in well under a second; what an interrupted run left behind
# is made anew; a second run in the same clone waits for the first.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
cd "$root"
# They would send packages elsewhere than into .venv, or find some outside it.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER

venv=$root/.venv
stamp=$venv/.set-up          # holds what the set-up was made from; written last
unfinished=$venv/.unfinished # there while packages are being changed
wanted_python=${PYTHON:-}

has_gpu() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null ||
    { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
}

# Debian's packages that are not there, one per line.
missing_debian_packages() {
  command -v g++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v flock >/dev/null || echo util-linux
  [ -x /usr/bin/bazel-4 ] || echo bazel-bootstrap
  [ -d /usr/share/bazel/rules/java ] || echo bazel-rules-java
  [ ! -x "$venv/bin/python" ] || return 0
  # An interpreter that is not Debian's (pyenv's, say) brings its own headers and venv.
  case $(command -v "${wanted_python:-python3}" || true) in
    '') [ -n "$wanted_python" ] || printf '%s\n' python3 python3-dev python3-venv ;;
    /usr/bin/python3* | /bin/python3*)
      can_make_venv /usr/bin/python3 || echo python3-venv
      has_headers /usr/bin/python3 || echo python3-dev
      ;;
  esac
}

can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

has_headers() {
  "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

apt_install() {
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=600)
  "${as_root[@]}" "${apt[@]}" install --no-install-recommends "$@" ||
    { "${as_root[@]}" "${apt[@]}" update &&
      "${as_root[@]}" "${apt[@]}" install --no-install-recommends "$@"; }
}

install_debian_packages() {
  local packages as_root=() sudo=
  mapfile -t packages < <(missing_debian_packages)
  ((${#packages[@]})) || return 0
  [ "$(id -u)" = 0 ] || sudo='sudo '
  if ! command -v apt-get >/dev/null || { [ -n "$sudo" ] && ! sudo -n true 2>/dev/null; }; then
    die "missing: ${packages[*]}. On Debian, install with: ${sudo}apt-get install ${packages[*]}"
  fi
  [ -z "$sudo" ] || as_root=(sudo -n)
  step "installing ${packages[*]} from Debian, up to 3 minutes" apt_install "${packages[@]}"
}

choose_python() {
  base_python=$(command -v "${wanted_python:-python3}") ||
    die "\`PYTHON\` must be an interpreter. Received: PYTHON=${wanted_python:-python3}, which is not found"
  # The interpreter behind a venv or a shim, because .venv itself may be what is on PATH.
  local facts
  facts=$("$base_python" -c 'import sys; print("%d.%d" % sys.version_info[:2], getattr(sys, "_base_executable", sys.executable))') ||
    die "\`PYTHON\` must be an interpreter. Received: PYTHON=$base_python, which does not run"
  base_version=${facts%% *}
  base_python=${facts#* }
  case $base_version in
    3.11 | 3.12 | 3.13) ;;
    *) die "\`PYTHON\` must be Python 3.11, 3.12 or 3.13, which TensorFlow 2.21 supports. Received: $base_python, Python $base_version. Try: make setup PYTHON=python3.11" ;;
  esac
  can_make_venv "$base_python" ||
    die "$base_python cannot make virtual environments. Install its venv package, or choose another: make setup PYTHON=..."
  has_headers "$base_python" ||
    die "$base_python has no headers (Python.h). Install its -dev package, or choose another: make setup PYTHON=..."
}

# A venv can be kept if its last change was finished, it runs, it was made here (its scripts hold its path), nobody asked
# for another version of Python, and it does not hold the other TensorFlow, whose files would lie in the same folder.
venv_is_sound() {
  local other='tensorflow-2*'
  [ "$tensorflow" = tensorflow-cpu ] && [ "$machine" = x86_64 ] || other='tensorflow_cpu-2*'
  [ ! -e "$unfinished" ] && [ -x "$venv/bin/python" ] &&
    venv_version=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) &&
    [[ $(sed -n 's/^command = //p' "$venv/pyvenv.cfg") == *" $venv" ]] &&
    ! compgen -G "$venv/lib/python*/site-packages/$other.dist-info" >/dev/null &&
    { [ -z "$wanted_python" ] || [ "$venv_version" = "$base_version" ]; }
}

# The functions below are run by `step`, where `set -e` does not hold: hence the chains.
make_venv() { rm -rf "$venv" && mkdir "$venv" && touch "$unfinished" && "$base_python" -m venv "$venv"; }

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@"; }

install_bootstrap() {
  local pins
  mapfile -t pins < <("$venv/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["bootstrap"], sep="\n")') &&
  pip_install "${pins[@]}"
}

# Most of TensorFlow's ten thousand files are never imported; Python compiles those that are.
install_packages() { pip_install --no-compile --group dev --group "$tensorflow"; }

install_own() {
  pip_install --no-deps --force-reinstall "$1" &&
    pip_install --no-deps --no-build-isolation --editable .
}

machine=$(uname -m)
case $machine in
  x86_64 | aarch64) ;;
  *) die "the machine must be x86_64 or aarch64, which TensorFlow 2.21 has wheels for. Received: $machine" ;;
esac
# TensorFlow's wheel for AArch64 has no CUDA, so a device changes nothing there.
tensorflow=tensorflow-cpu
why="for the CPU, no NVIDIA device here; 1 to 3 minutes"
if has_gpu && [ "$machine" = x86_64 ]; then
  tensorflow=tensorflow-gpu
  why="for the NVIDIA device here; several minutes and 4 GB"
elif has_gpu; then
  why="for the CPU: its wheel for $machine does not know the NVIDIA device here; 1 to 3 minutes"
fi
inputs=(pyproject.toml hatch_build.py tools/setup.sh tools/horovod_wheel.sh tools/horovod_patch.py)
# The path is part of it: a venv that was moved or copied is no good.
state=$(cat "${inputs[@]}" <(printf '%s\n%s\n' "$tensorflow" "$root") | sha256sum)

up_to_date() {
  [ -f "$stamp" ] && [ "$(<"$stamp")" = "$state" ] && [ ! -e "$unfinished" ] && [ -x "$venv/bin/python" ] &&
    [ -z "$(missing_debian_packages)" ] &&
    { [ -z "$wanted_python" ] || { choose_python && venv_is_sound; }; }
}

if up_to_date; then
  [ "${1:-}" = --quiet ] || say "up to date"
  exit 0
fi

install_debian_packages
exec 9<"$root"
if ! flock -n 9; then
  say "another set-up of this clone is running; waiting for it"
  flock 9
fi
if up_to_date; then exit 0; fi

rm -f "$log_file"
# Keep the interpreter of a sound .venv unless another one was asked for.
if [ -n "$wanted_python" ] || ! venv_is_sound; then choose_python; fi
if ! venv_is_sound; then
  step "making .venv with $base_python ($base_version)" make_venv
fi
touch "$unfinished"
rm -f "$stamp"
step "installing pip and its kin into .venv" install_bootstrap
step "installing TensorFlow ($why) and the development tools" install_packages
horovod=$(tools/horovod_wheel.sh)
step "installing Horovod and this tree into .venv" install_own "$horovod"
rm -f "$unfinished"
printf '%s\n' "$state" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready in $SECONDS s"
