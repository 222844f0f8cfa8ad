# SPDX-License-Identifier: Apache-2.0
"""Compiles the built-in codecs and robust aggregation for GPUs with nvcc to one shared library.

    python tools/build_cuda.py                    tf_hips/ops/libtf_hips_cuda.so
    python tools/build_cuda.py --arch sm_90 ...   for one kind of GPU, in a third of the time

`make build CUDA=1` calls it. Where nvcc is not, it says so and that is all. A source is compiled
again when it, a header, nvcc or its flags have changed.
"""

import argparse
import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compll import CompileError, pipeline, specification  # noqa: E402
from compll.backends.toolchain import NVCC_FLAGS  # noqa: E402

LIBRARY = ROOT / "tf_hips/ops/libtf_hips_cuda.so"
INFO = ROOT / "tf_hips/_build_info.py"
DEADLINE_S = 600


def main() -> int:
    """Compiles and links; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=LIBRARY, metavar="LIBRARY")
    parser.add_argument("--arch", metavar="SM", help="such as sm_90; default: all")
    parser.add_argument("--with", dest="more", nargs="*", type=Path, default=[], metavar="FILE.cu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    options = parser.parse_args()
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    if nvcc is None:
        print("cuda: not compiled: nvcc is not here")
        return 0
    flags = [flag for flag in NVCC_FLAGS if options.arch is None or "gencode" not in flag]
    flags += [] if options.arch is None else [f"-arch={options.arch}"]
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    folder = ROOT / "build/cuda" / (options.arch or "all")
    folder.mkdir(parents=True, exist_ok=True)
    specs = sorted((ROOT / "tf_hips/ops/specs").glob("*.pse"))
    specs = [spec for spec in specs if _write(spec, folder)]
    sources = [folder / f"{spec.stem}.cu" for spec in specs]
    ours = [Path("tf_hips/cc/cuda", name) for name in ("library.cu", "robust.cu")]
    sources += [ROOT / path for path in (*ours, *options.more)]
    # What goes into every object.
    base = hashlib.sha256("\0".join([version, *flags]).encode())
    headers = [*ROOT.glob("tf_hips/cc/cuda/*.*h"), *ROOT.glob("tf_hips/cc/runtime/*.h")]
    for header in sorted(headers):
        base.update(header.read_bytes())
    command = [nvcc, *flags, f"-I{ROOT}"]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        done = [pool.submit(_compile, command, source, folder, base.copy()) for source in sources]
        results = [task.result() for task in done]
    failed = [text for text in results if isinstance(text, str)]
    if failed:
        sys.stderr.write("\n".join(failed) + "\n")
        return 1
    objects = [str(path) for path in results]
    made = options.output.with_suffix(".new.so")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    link = [nvcc, *flags, "-shared", "-o", str(made), *objects]
    subprocess.run(link, check=True, timeout=DEADLINE_S)
    made.replace(options.output)
    release = re.search(r"V(\d+\.\d+\.\d+)", version)
    told = f"nvcc {release.group(1) if release else 'unknown'}: " + ", ".join(
        re.findall(r",code=(\w+)", " ".join(flags)) or [str(options.arch)]
    )
    if options.output == LIBRARY and INFO.is_file():
        text = re.sub(r'(?m)^CUDA = ".*"$', f'CUDA = "{told}"', INFO.read_text(encoding="utf-8"))
        INFO.write_text(text, encoding="utf-8")
    print(f"cuda: {len(specs)} codecs and robust aggregation, {told}, in {options.output.name}")
    return 0


def _write(spec: Path, folder: Path) -> bool:
    """Writes the source of a codec; False, and a message, if the back end refuses it."""
    try:
        pipeline.write([specification.read(spec)], folder, ["cuda"])
    except CompileError as error:
        if {found.code for found in error.diagnostics} != {"E701"}:
            raise
        print(f"cuda: {spec.stem} is left out: {error.diagnostics[0].message}")
        return False
    return True


def _compile(command: list[str], source: Path, folder: Path, digest: "hashlib._Hash") -> Path | str:
    """The object of a source, or what nvcc said."""
    digest.update(source.read_bytes())
    target = folder / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    if target.is_file():
        return target
    made = target.with_suffix(".new.o")
    done = subprocess.run(
        [*command, "-c", "-o", str(made), str(source)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        return f"cuda: {source.name} was refused:\n{done.stderr[:4000]}"
    made.replace(target)
    for other in folder.glob(f"{source.stem}-*.o"):
        if other != target:
            other.unlink()
    return target


if __name__ == "__main__":
    sys.exit(main())
