# SPDX-License-Identifier: Apache-2.0
"""A codec's specification: one file, or an Encode in one file and its Decode in another.

Two files are read as one text, the Encode first, so they are the same codec as one file that holds
both, with the same packets. Which half a file holds is read from the heads of its functions alone:
a file need not be right to be found, and its mistakes are told by the compiler.

A file that holds one half finds the other beside it by name: FooEncode.pse and FooDecode.pse, also
`_encode` and `_decode`, `Enc` and `Dec`.
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

ENDINGS = (("Encode", "Decode"), ("encode", "decode"), ("Enc", "Dec"), ("enc", "dec"))
"""Of the stems of two files that hold one codec."""

_COMMENT = re.compile(rb"//[^\r\n]*|/\*.*?\*/", re.DOTALL)
_HEAD = re.compile(rb"\bvoid\s+([A-Z][A-Za-z0-9]*)(Encode|Decode)\s*\(")


@dataclass(frozen=True)
class Specification:
    """What holds one codec.

    Attributes:
        name: of the codec, after which its files and symbols are called.
        parts: one or two files: what messages call it, and its content.
    """

    name: str
    parts: tuple[tuple[str, bytes], ...]

    @cached_property
    def data(self) -> bytes:
        """The whole specification: the files one below the other, each on lines of its own."""
        whole = b""
        for _, content in self.parts:
            if whole and not whole.endswith(b"\n"):
                whole += b"\n"
            whole += content
        return whole

    @property
    def shown(self) -> str:
        """The files, for messages."""
        return " + ".join(file for file, _ in self.parts)


def read(path: str | Path, other: str | Path | None = None) -> Specification:
    """Reads a specification.

    Args:
        path: a file; if it holds one half and the other lies beside it, that is read, too.
        other: the file of the other half, wherever it is.

    Raises:
        OSError: a file cannot be read.
    """
    file = _File(Path(path), str(path))
    if other is not None:
        return _pair(file, _File(Path(other), str(other)))
    found = _beside(file)
    return _alone(file) if found is None else _pair(file, found)


def group(paths: Sequence[str | Path]) -> list[Specification]:
    """Reads specifications; two files that hold the halves of one codec become one.

    Halves are paired by the names of their files, then by the names of their functions, then with
    what lies beside them.

    Returns:
        One for each codec, in the order of `paths`.

    Raises:
        ValueError: an Encode has several Decodes among the files, or the other way round.
        OSError: a file cannot be read.
    """
    files = [_File(Path(path), str(path)) for path in paths]
    partner: dict[int, int] = {}
    for is_by_name in (True, False):
        free = [number for number in range(len(files)) if number not in partner]
        for number in free:
            fitting = [other for other in free if files[number].fits(files[other])]
            if is_by_name:
                beside = _named_beside(files[number].path)
                fitting = [other for other in fitting if files[other].path == beside]
            if len(fitting) > 1 and not is_by_name:
                shown = " and ".join(files[other].shown for other in fitting)
                wanted = "".join(files[fitting[0]].half or ())
                raise ValueError(
                    f"{files[number].shown} must have one other half, {wanted}. Received: {shown}"
                )
            if fitting and number not in partner and fitting[0] not in partner:
                partner |= {number: fitting[0], fitting[0]: number}
    made = []
    for number, file in enumerate(files):
        if number not in partner:
            found = _beside(file)
            made.append(_alone(file) if found is None else _pair(file, found))
        elif number < partner[number]:
            made.append(_pair(file, files[partner[number]]))
    return made


def in_two_files(folder: Path, name: str) -> Iterator[Specification]:
    """The specifications of a name that a folder holds in two files, if there are any."""
    for joint in ("", "_"):
        for endings in ENDINGS:
            one, two = (folder / f"{name}{joint}{ending}.pse" for ending in endings)
            if one.is_file() and two.is_file():
                yield _pair(_File(one, str(one)), _File(two, str(two)))


def looked_for(path: Path, content: bytes) -> str:
    """What was looked for where a file holds one half only, and what was found."""
    file = _File(path, str(path), content)
    kind, other = ("Decode", "Encode") if file.is_decode else ("Encode", "Decode")
    beside = _named_beside(path)
    if beside is None:
        return (
            f"{path.name} does not end with {kind}.pse, so no file beside it was looked for: name "
            f"them X{kind}.pse and X{other}.pse, or give both"
        )
    if not beside.is_file():
        return f"there is no {beside.name} beside it"
    held = _File(beside, str(beside)).functions
    told = " and ".join(map("".join, held)) or "no such function"
    wanted = f"{file.half[0]}{other}" if file.half is not None else f"its {other}"
    return f"{beside.name} beside it must hold {wanted}. Received: {told}"


class _File:
    """A file and which half of a codec it holds."""

    def __init__(self, path: Path, shown: str, content: bytes | None = None) -> None:
        self.path = path
        self.shown = shown
        given = path.read_bytes() if content is None else content
        self.content = given.removeprefix(codecs.BOM_UTF8)  # it may stand before the second half
        heads = _HEAD.finditer(_COMMENT.sub(b" ", self.content))
        # Of each function its X and which it is; of a half there is one.
        self.functions = [(head[1].decode(), head[2].decode()) for head in heads]
        self.half = self.functions[0] if len(self.functions) == 1 else None

    @property
    def is_encode(self) -> bool:
        return self.half is not None and self.half[1] == "Encode"

    @property
    def is_decode(self) -> bool:
        return self.half is not None and self.half[1] == "Decode"

    def fits(self, other: "_File") -> bool:
        """Whether the other file holds the other half of the same codec."""
        if self.half is None or other.half is None:
            return False
        return self.half[0] == other.half[0] and self.half[1] != other.half[1]


def _named_beside(path: Path) -> Path | None:
    """Where the other half of a file would lie, if the ending of its stem says so."""
    for endings in ENDINGS:
        for mine, other in (endings, endings[::-1]):
            if path.stem.endswith(mine):
                return path.with_name(f"{path.stem.removesuffix(mine)}{other}{path.suffix}")
    return None


def _beside(file: _File) -> _File | None:
    """The other half of a file, if it lies beside it."""
    path = _named_beside(file.path) if file.half is not None else None
    if path is None or not path.is_file():
        return None
    found = _File(path, str(path))
    return found if file.fits(found) else None


def _alone(file: _File) -> Specification:
    return Specification(file.path.stem, ((file.shown, file.content),))


def _pair(one: _File, two: _File) -> Specification:
    """Two files as one, called by what their names share, or by the functions' X."""
    if (two.is_encode and not one.is_encode) or (one.is_decode and not two.is_decode):
        one, two = two, one
    pairs = zip(one.path.stem, two.path.stem, strict=False)
    name = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).rstrip("_")
    if not name:
        name = one.half[0] if one.half is not None else one.path.stem
    return Specification(name, tuple((file.shown, file.content) for file in (one, two)))
