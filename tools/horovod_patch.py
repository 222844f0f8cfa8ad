# SPDX-License-Identifier: Apache-2.0
"""Changes the source of Horovod 0.28.1 where TensorFlow 2.21, g++ 14 or a slow link needs it.

    python tools/horovod_patch.py FOLDER    the unpacked source; ends with 1 if it is another one

Each change replaces lines that must occur exactly once, so that a source that differs is refused
instead of built as it is. Why: docs/decisions/0022-both-directions-at-once.md.
"""

import dataclasses
import re
import sys
from pathlib import Path

_GLOO = "third_party/gloo/gloo"


@dataclasses.dataclass(frozen=True)
class Change:
    """Lines of one file, and what takes their place.

    Attributes:
        file: relative to the source.
        old: whole lines.
        new: whole lines, or nothing.
    """

    file: str
    old: str
    new: str


def _swapped(file: str, send: str, receive: str) -> Change:
    """Says where to receive before it sends: the word for it must not queue behind the data."""
    return Change(file, send + receive, receive + send)


CHANGES = (
    # Its headers are shipped no more; the file is optional.
    Change(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # It assigns to a constant, which nobody calls; g++ 14 refuses it all the same.
    Change(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  FLATBUFFERS_CONSTEXPR_CPP14 span &operator=(const span &other)\n"
        "      FLATBUFFERS_NOEXCEPT {\n"
        "    data_ = other.data_;\n"
        "    count_ = other.count_;\n"
        "  }\n",
        "",
    ),
    _swapped(
        f"{_GLOO}/alltoallv.cc",
        "    in->send(\n"
        "        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n",
        "    out->recv(\n"
        "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n",
    ),
    *(
        _swapped(
            f"{_GLOO}/allgatherv.cc",
            f"{indent}out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n",
            f"{indent}out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n",
        )
        for indent in ("      ", "    ")  # of the first round, and of the others
    ),
)


def patch(source: Path) -> None:
    """Makes all changes, or none.

    Raises:
        ValueError: a file does not hold a change's lines exactly once.
    """
    texts: dict[Path, str] = {}
    for change in CHANGES:
        path = source / change.file
        text = texts[path] if path in texts else path.read_text(encoding="utf-8")
        lines = re.compile(f"^{re.escape(change.old)}", re.MULTILINE)
        found = len(lines.findall(text))
        if found != 1:
            raise ValueError(
                f"{change.file} of Horovod must hold these lines exactly once, "
                f"found them {found} times:\n{change.old}"
            )
        texts[path] = lines.sub(lambda _, new=change.new: new, text)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Patches the folder that is given; the exit code."""
    if len(arguments) != 1:
        print("usage: horovod_patch.py FOLDER", file=sys.stderr)
        return 2
    try:
        patch(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
