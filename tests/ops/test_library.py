# SPDX-License-Identifier: Apache-2.0
"""Libraries that are missing or do not fit: the error names both versions and what mends it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tf_hips.errors import LibraryError
from tf_hips.ops import library, native


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    """Each test finds the library as at the start of a process, and leaves it so."""
    for load in (library.native, library.ops):
        load.cache_clear()
    yield
    for load in (library.native, library.ops):
        load.cache_clear()


def _fake_tensorflow(version: str) -> ModuleType:
    """A TensorFlow without load_op_library: nothing may be loaded."""
    module = ModuleType("tensorflow")
    module.__version__ = version
    return module


def test_another_tensorflow_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "built_with", lambda: SimpleNamespace(TENSORFLOW="2.20.1"))
    with pytest.raises(LibraryError) as error:
        library.ops(_fake_tensorflow("2.21.0"))
    text = str(error.value)
    assert "built for TensorFlow 2.20.1" in text
    assert "runs TensorFlow 2.21.0" in text
    assert "`make build`" in text


def test_codecs_want_a_library_with_all_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.native()

    class Older:
        def __getitem__(self, name: str) -> object:
            if name == "tf_hips_encode_momentum":
                raise AttributeError(name)
            return found[name]

    monkeypatch.setattr(library, "native", Older)
    with pytest.raises(LibraryError, match=r"must have `encode_momentum` of codecs\. .*make build"):
        native._Functions()


def test_a_library_without_a_function_is_an_older_one() -> None:
    with pytest.raises(LibraryError, match=r"must have rules\. Received: an older one; run `make"):
        library.functions("tf_hips_robust_", {"mix": (), "nothing_of_ours": ()}, "rules")


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.21.0", "2.21.0", True),
        ("2.21.0", "2.21.1", True),
        ("2.21.0", "2.22.0", False),
        ("2.21.0", "3.21.0", False),
        ("2.2.0", "2.21.0", False),
    ],
)
def test_which_versions_fit(built: str, running: str, fits: bool) -> None:
    if fits:
        library.check_tensorflow(built, running)
    else:
        with pytest.raises(LibraryError):
            library.check_tensorflow(built, running)


def test_the_stamp_is_of_this_tensorflow() -> None:
    from importlib.metadata import distributions

    versions = {d.version for d in distributions() if d.name.startswith("tensorflow")}
    assert library.built_with().TENSORFLOW in versions
    # What `make build` says, or `make build CUDA=1`.
    assert library.built_with().CUDA.startswith(("not compiled", "nvcc "))


def test_a_codec_may_come_while_the_ops_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _fake_tensorflow(library.built_with().TENSORFLOW)
    fake.load_op_library = lambda path: SimpleNamespace(path=path)
    fake.errors = SimpleNamespace(OpError=OSError)
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    monkeypatch.setattr(library, "_codecs", {"first": 1})
    given: list[str] = []

    def give(name: str, table: int) -> None:
        del table
        given.append(name)
        if len(given) == 1:  # as another thread would
            library.add_codec("second", 2)

    monkeypatch.setattr(library, "_give", give)
    assert library.ops(fake).path == str(library.OPS_PATH)
    assert set(given) == {"first", "second"}


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "OPS_PATH", tmp_path / "_tf_hips_ops.so")
    monkeypatch.setattr(library, "NATIVE_PATH", tmp_path / "libtf_hips_native.so")
    fake = _fake_tensorflow(library.built_with().TENSORFLOW)
    with pytest.raises(LibraryError, match=r"_tf_hips_ops\.so is missing; run `make build`"):
        library.ops(fake)
    with pytest.raises(LibraryError, match=r"libtf_hips_native\.so is missing; run `make build`"):
        library.native()


def test_nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tf_hips._build_info", None)
    with pytest.raises(LibraryError, match="not been built; run `make build`"):
        library.built_with()


def test_damaged_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "libtf_hips_native.so"
    damaged.write_bytes(b"\x7fELF and then nothing")
    monkeypatch.setattr(library, "NATIVE_PATH", damaged)
    with pytest.raises(LibraryError, match=r"does not load: .*`make build`"):
        library.native()


def test_another_interface_version(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"must have interface version 99\. Received: {library.ABI_VERSION}"
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    with pytest.raises(LibraryError, match=message):
        library.native()


def test_the_native_face_imports_no_tensorflow() -> None:
    program = (
        "import sys, numpy as np; from tf_hips import ops; from tf_hips.ops import native\n"
        "c = ops.error_feedback(ops.onebit()); x = np.ones(9, np.float32); r = np.zeros_like(x)\n"
        "p = native.encode(c, x, ops.Key(1, 2, 3), r)\n"
        "assert (native.decode(c, p, 9) == 1).all()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('tensorflow', 'keras')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stdout.strip() == "[]"


def test_the_ops_leave_no_symbols_behind() -> None:
    for path, wanted in (
        (library.OPS_PATH, {"tf_hips_ops_add_codec", "tf_hips_ops_add_cuda_codec"}),
        (library.NATIVE_PATH, {"tf_hips_"}),
    ):
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        ).stdout
        names = {line.split()[-1] for line in listing.splitlines()}
        assert all(any(name.startswith(prefix) for prefix in wanted) for name in names), names
        assert bool(names) == bool(wanted)
