# SPDX-License-Identifier: Apache-2.0
"""One kernel in place of those of an encoder and of its decode, with error feedback (held.cuh).

    begin     the sweep: reductions, and codes that need none of them; its tiles of gradient +
              residual stay in shared memory
    reduce    the ends of the reductions, and the header, by the last block of a chunk
    end       what is left of the tiles, once all of the packet is known

The kernels that it is made of stay: they do calls without a residual, and where it cannot run. An
encoder whose codes need its reductions has a second sweep, which could be done so, too: that was
slower, as so few blocks of threads run at once.
"""

from dataclasses import dataclass

from compll.backends.cuda_kernels import Kernels
from compll.backends.cuda_reads import knows_tile, size_of, takes_tile
from compll.backends.cuda_written import ROWS, Written

_NAME = "encode_held_grid"


@dataclass(frozen=True)
class Held:
    """The kernel that holds tiles.

    Attributes:
        begin: the sweep.
        reduce: what ends it.
        arrived: member of the call that counts units.
    """

    begin: Written
    reduce: Written
    arrived: str


def hold(kernels: Kernels) -> Held | None:
    """Writes the kernel that does all kernels of an encoder so far, if they can be done so."""
    found = _find(kernels)
    for one in kernels.written:
        one.settle(may_hold=found is not None and one is found.begin)
    if found is not None:
        _write(kernels, found)
    return found


def _find(kernels: Kernels) -> Held | None:
    side = kernels.side
    # What is anywhere else than in its own tile is not to be read: no vector holds the sum.
    if side.is_decode or side.reads_anywhere or len(kernels.written) != 2:
        return None
    begin, reduce = kernels.written
    if begin.step is None or not begin.step.reduces or reduce.kind != "finish":
        return None
    if not begin.has_sum or begin.step.size != size_of(side.gradient):
        return None
    decoder, writes = kernels.decoder, begin.step.writes
    if decoder is None or not knows_tile(decoder, writes, {}, had_header=True):
        return None
    if takes_tile(decoder):  # there is no room for it beside those that are kept
        return None
    return Held(begin, reduce, kernels.array("Arrived", "arrived", "1"))


def _write(kernels: Kernels, found: Held) -> None:
    lines, loop = kernels.lines, found.begin.loop
    lines.add("// The kernels above and a decode, by blocks of threads that keep their tiles.")
    lines.open(f"TF_HIPS_HELD_KERNEL {_NAME}(const EncodeCall call, const Hold hold) {{")
    lines.open("const auto begin = [&](uint32_t tile, float* held) {")
    lines.add(f"{found.begin.name}<true>(call, tile, held);")
    lines.close("};")
    lines.add(f"const auto reduce = [&](uint32_t chunk) {{ {found.reduce.name}(call, chunk); }};")
    lines.open("const auto end = [&](uint32_t tile, float* held) {")
    lines.add(
        f"const Spot spot = find_spot(tile, call.tiles[{loop}]);",
        f"decode_kernels::{ROWS}<true>(call.rest, spot, held);",
    )
    lines.close("};")
    lines.add(f"hold_units(hold, call.{found.arrived}, begin, reduce, end);")
    lines.close()
    lines.add("")


def host_lines(kernels: Kernels, found: Held) -> list[str]:
    """What launches it, a function of the host."""
    loop, lines = found.begin.loop, kernels.lines.same_depth()
    lines.add("// Starts the kernel that keeps tiles. False: it cannot run, or is not worth it.")
    lines.open("bool hold_encode(const EncodeCall& call, cudaStream_t stream) {")
    lines.add(
        "using namespace encode_kernels;",
        "if (call.alone != 0 || call.residual == nullptr) return false;",
        f"const Hold hold = deal_tiles(call.tensor.chunks, call.tiles[{loop}], "
        f"call.blocks[{loop}],",
        f"    [](int tiles) {{ return int64_t{{TF_HIPS_HELD_BLOCKS({_NAME}, tiles)}}; }});",
        "if (hold.blocks == 0) return false;",
        "const size_t bytes = static_cast<size_t>(call.tensor.chunks) * sizeof(Arrived);",
        f"cudaMemsetAsync(call.{found.arrived}, 0, bytes, stream);",
        f"return TF_HIPS_HOLD({_NAME}, hold, stream, call);",
    )
    lines.close()
    return lines.text().splitlines()
