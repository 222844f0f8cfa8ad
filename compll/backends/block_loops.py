# SPDX-License-Identifier: Apache-2.0
"""The loop over tiles that reductions of blocks share with the sweeps that use them (blocks.py)."""

from compll.backends.blocks import block_reducer, block_source, makes_whole
from compll.backends.loops import Stored, parts_of
from compll.backends.row_code import Rest, RowCode
from compll.backends.row_loops import RowLoops
from compll.backends.tile_feedback import NO_FEEDBACK, TileFeedback
from compll.ir import nodes
from compll.ir.sizes import blocks_in
from compll.ir.types import FLOAT

# Bits of codes that a row has in one or two words.
_PACKED_WIDTHS = (1, 2, 4, 8)


class BlockLoops(RowLoops):
    """Emits also the loops that hold the blocks of a tile."""

    def blocks_sweep(
        self,
        stores: list[nodes.Store],
        sweeps: list[nodes.Sweep],
        targets: dict[int, str],
        feedback: TileFeedback = NO_FEEDBACK,
        *,
        begin: str = "0",
        end: str | None = None,
    ) -> None:
        """One loop over tiles for reductions of blocks and the sweeps that use them (blocks.py).

        Args:
            stores: the reductions, of one vector length and size of blocks.
            sweeps: what follows, of that length or of the number of blocks.
            targets: where each field is written to.
            feedback: what is done about feedback, first by the first reduction and last by the
                last sweep.
            begin: C++ for the element that it begins with, the first of a tile.
            end: C++ for the element that it ends before; None: all are done.
        """
        source, block = block_source(stores[0])
        size = self.number(source.size, "size") if end is None else end
        length = self.names.fresh("block")
        self.lines.add(f"const int64_t {length} = {self.c(block)};")
        inits = ["" if makes_whole(store) else self._block_init(store) for store in stores]
        self._size, self._step = source.size, "kTile"
        head = f"for_tiles<kTile>({begin}, {size}, [&](int64_t base, auto count)"
        self.lines.open(f"{head} TF_HIPS_INLINED {{")
        if len(stores) > 1:
            self.lines.add(*feedback.first)
        ahead = self.read_in_order([block_source(store)[0] for store in stores])
        is_first = bool(feedback.first)
        is_long = any(map(makes_whole, stores))
        ahead = ["gradient" if is_first and pointer == "in" else pointer for pointer in ahead]
        for store, init in zip(stores, inits, strict=True):
            part, _ = block_source(store)
            self._prepare([part])
            if makes_whole(store):
                self._transform_blocks(store, length, feedback if len(stores) == 1 else NO_FEEDBACK)
                continue
            self._reduce_blocks(store, length, init, feedback if len(stores) == 1 else NO_FEEDBACK)
        self._forget()
        for sweep in sweeps:
            if sweep.size == source.size:
                is_last = sweep is sweeps[-1]
                own = feedback if is_last else NO_FEEDBACK
                self._steps_of_tile(sweep, targets, ahead, own, is_long=is_long)
            else:
                self._sweep_of_blocks(sweep, length, targets)
            # Their tiles ended with that scope.
            self._forget()
        if all(sweep.size != source.size for sweep in sweeps):
            self._ask_for(ahead, "prefetch_tile({} + base, count);")
        if sweeps[-1].size != source.size:
            self.lines.add(*feedback.last_lines())
        self.lines.close("});")
        self._forget()

    def _ask_for(self, ahead: list[str], how: str) -> None:
        """Asks for what the next tiles read; with feedback that is the residual as well."""
        self.lines.add(*(how.format(pointer) for pointer in ahead))
        if "gradient" in ahead:
            self.lines.add(f"if constexpr (kFeedback) {how.format('residual')}")

    def _ask_for_sums(self) -> None:
        """The same of a loop that forms the sum, and that computes for long before it reads on."""
        self.lines.add(
            "if constexpr (kFeedback) {",
            "  prefetch_sums(gradient + base, residual + base, value + base, count);",
            "} else {",
            "  prefetch_blocks(gradient + base, count);",
            "}",
        )

    def _sweep_of_blocks(self, sweep: nodes.Sweep, length: str, targets: dict[int, str]) -> None:
        """What a sweep of as many elements as there are blocks does for those of a tile."""
        self._size, self._step = sweep.size, "kMaxBlocks"
        tile = f"for_blocks(base, count, {length}, [&](int64_t base, int64_t count)"
        self.lines.open(f"{tile} TF_HIPS_INLINED {{")
        self._prepare(parts_of(sweep))
        for write in sweep.writes:
            self._write(write, targets[write.field])
        self._run_shared()
        self.lines.close("});")

    def _steps_of_tile(
        self,
        sweep: nodes.Sweep,
        targets: dict[int, str],
        ahead: list[str],
        feedback: TileFeedback,
        *,
        is_long: bool,
    ) -> None:
        """What a sweep does for a tile whose blocks are reduced, a step at a time.

        `ahead`: what the next tiles read; `is_long`: a tile is transformed, too.
        """
        self._size, self._step = sweep.size, "kTile"
        for part in parts_of(sweep):
            self._position = part.position
            self._hoist(part)
        done = self.names.fresh("done") if feedback.held is not None else ""
        if done:
            self.lines.add(f"[[maybe_unused]] int64_t {done} = 0;")
        self._draw_ahead(parts_of(sweep))
        self._step, self._begin = "kStep", "at"
        head = "for_steps(base, count, [&](int64_t base, [[maybe_unused]] int64_t at, auto count)"
        self.lines.open(f"{head} TF_HIPS_INLINED {{")
        if is_long and ahead == ["gradient"]:
            self._ask_for_sums()
        else:
            self._ask_for(ahead, "prefetch_blocks({} + base, count);")
        self._fetched |= {vector.var for vector in self.stored.values()}
        self._prepare(parts_of(sweep))
        self._is_single = len(sweep.writes) == 1
        if done:
            self._codes_and_left(sweep, targets, feedback, is_first=False, done=done)
        for write in sweep.writes:
            self._write(write, targets[write.field])
        self._run_shared()
        self.lines.close("});")
        self._begin = "0"
        self.lines.add(*feedback.last_lines(done))

    def _block_init(self, store: nodes.Store) -> str:
        value = store.value
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"a block_reduce is expected. Received: {value!r}")
        init = self.names.fresh("init")
        kind = self.c.type(value.init.type)
        self.lines.add(f"const {kind} {init} = {self.c(value.init)};")
        return init

    def _reduce_blocks(
        self, store: nodes.Store, length: str, init: str, feedback: TileFeedback
    ) -> None:
        """Reduces the blocks of a tile to a vector of its own."""
        value = store.value
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"a block_reduce is expected. Received: {value!r}")
        part, _ = block_source(store)
        function, element = block_reducer(value)
        pointer = self.names.of(store.var)
        self.lines.add(f"alignas(64) {self.c.type(value.init.type)} {pointer}[kMaxBlocks];")
        self._position = part.position
        call = summed = None
        if self.apart is not None and value.init.type == FLOAT:
            if feedback.first and feedback.gradient is not None:
                rows = RowCode(self.c, self, part, sums=feedback.gradient)
                summed = rows.blocks(self.apart, value.reducer, Rest(is_first=True))
            # The blocks of the tile are numbered from its own first one.
            rows = RowCode(self.c, self, part, frozenset(self._hoisted), begin=self._begin)
            call = rows.blocks(self.apart, value.reducer)
        if summed is not None:
            is_done = self.names.fresh("is_summed")
            self.lines.add(f"[[maybe_unused]] bool {is_done} = false;")
            self.lines.open("if constexpr (kFeedback) {")
            self.lines.add(f"{is_done} = {summed}{length}, {init}, {pointer});")
            self.lines.close()
            self.lines.open(f"if (!{is_done}) {{")
        self.lines.add(*feedback.first)
        self.run_spreads()
        if call is not None:
            self.lines.open(f"if (!({call}{length}, {init}, {pointer}))) {{")
        tile = self.tile(part, element)
        self.lines.add(f"{function}({tile}, count, {length}, {init}, {pointer});")
        if call is not None:
            self.lines.close()
        if summed is not None:
            self.lines.close()
        if call is not None or summed is not None:
            # It was made in a scope of its own.
            self._made.clear()
        size = blocks_in(part.size, value.block)
        self.stored[store.var] = Stored(
            store.var, size, "kMaxBlocks", pointer, is_field=False, bits=None, is_local=True
        )

    def _transform_blocks(self, store: nodes.Store, length: str, feedback: TileFeedback) -> None:
        """Transforms the blocks of a tile to a tile of its own."""
        part, _ = block_source(store)
        self._position = part.position
        self.lines.add(*feedback.first)
        tile = self.names.of(store.var)
        self.lines.add(f"alignas(64) float {tile}[kTile];")
        made = self._tile_of_codes(part, tile)
        if made is None:
            self.run_spreads()
            made = self.tile(part, FLOAT)
        self.lines.add(f"hadamard_tile({made}, count, {length}, {tile});")
        self.stored[store.var] = Stored(
            store.var, part.size, "", tile, is_field=False, bits=None, is_cached=True
        )

    def _tile_of_codes(self, part: nodes.Elementwise, tile: str) -> str | None:
        """Computes a tile from a decode's codes in rows, if it can be; returns where it is."""
        if self.apart is None or self._hoisted:
            return None
        rows = self.row_code(part)
        if rows is None or not (rows.packed or rows.uses_bytes):
            return None
        call = rows.values(self.apart)
        self.run_unpacks()
        self.lines.open("{")
        if rows.varied_bits is not None:
            self.lines.add("constexpr int kBits = 8;")
            self.take_bytes(rows)
        else:
            self.run_before(rows)
        self.lines.open(f"if (!({call}TF_HIPS_SET, {tile}))) {{")
        self._position = part.position
        self.loop(self.statements(part, lambda text: f"{tile}[j] = {text};", FLOAT))
        self.lines.close()
        self.lines.close()
        return tile
