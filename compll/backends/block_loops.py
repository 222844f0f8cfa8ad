# SPDX-License-Identifier: Apache-2.0
"""The loop over tiles that reductions of blocks share with the sweeps that use them (blocks.py)."""

from compll.backends.loops import Loops, Stored, parts_of
from compll.ir import nodes
from compll.ir.sizes import blocks_in
from compll.ir.types import BOOL, FLOAT, INT, Type


class BlockLoops(Loops):
    """Emits also the loops that hold the blocks of a tile."""

    def blocks_sweep(
        self,
        stores: list[nodes.Store],
        sweeps: list[nodes.Sweep],
        targets: dict[int, str],
        *,
        first: tuple[str, ...] = (),
        last: tuple[str, ...] = (),
    ) -> None:
        """One loop over tiles for reductions of blocks and the sweeps that use them (blocks.py).

        Args:
            stores: the reductions, of one vector length and size of blocks.
            sweeps: what follows, of that length or of the number of blocks.
            targets: where each field is written to.
            first: statements at the beginning of each tile.
            last: statements at the end of each tile.
        """
        source, block = block_source(stores[0])
        size = self.number(source.size, "size")
        length = self.names.fresh("block")
        self.lines.add(f"const int64_t {length} = {self.c(block)};")
        inits = [self._block_init(store) for store in stores]
        self._size, self._step = source.size, "kTile"
        head = f"for_tiles<kTile>(0, {size}, [&](int64_t base, auto count)"
        self.lines.open(f"{head} TF_HIPS_INLINED {{")
        self.lines.add(*first)
        for store, init in zip(stores, inits, strict=True):
            part, _ = block_source(store)
            self._prepare([part])
            self._reduce_blocks(store, length, init)
        for sweep in sweeps:
            is_of_blocks = sweep.size != source.size
            self._size = sweep.size
            if is_of_blocks:
                tile = f"for_blocks(base, count, {length}, [&](int64_t base, int64_t count)"
                self.lines.open(f"{tile} TF_HIPS_INLINED {{")
            self._prepare(parts_of(sweep))
            for write in sweep.writes:
                self._write(write, targets[write.field])
            self._run_shared()
            if is_of_blocks:
                self.lines.close("});")
                # Their tiles ended with that scope.
                self._forget()
        self.lines.add(*last)
        self.lines.close("});")
        self._forget()

    def _block_init(self, store: nodes.Store) -> str:
        value = store.value
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"a block_reduce is expected. Received: {value!r}")
        init = self.names.fresh("init")
        kind = self.c.type(value.init.type)
        self.lines.add(f"const {kind} {init} = {self.c(value.init)};")
        return init

    def _reduce_blocks(self, store: nodes.Store, length: str, init: str) -> None:
        """Reduces the blocks of a tile to a vector of its own."""
        value = store.value
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"a block_reduce is expected. Received: {value!r}")
        part, _ = block_source(store)
        function, element = block_reducer(value)
        tile = self.tile(part, element)
        pointer = self.names.of(store.var)
        self.lines.add(
            f"alignas(64) {self.c.type(value.init.type)} {pointer}[kMaxBlocks];",
            f"{function}({tile}, count, {length}, {init}, {pointer});",
        )
        size = blocks_in(part.size, value.block)
        self.stored[store.var] = Stored(
            store.var, size, "kMaxBlocks", pointer, is_field=False, bits=None, is_local=True
        )


def block_source(store: nodes.Store) -> tuple[nodes.Elementwise, nodes.Expr]:
    """What a reduction of blocks reduces, and the size of its blocks."""
    value = store.value
    if isinstance(value, nodes.BlockReduce) and isinstance(value.source, nodes.Elementwise):
        return value.source, value.block
    raise TypeError(f"a block_reduce of an inlined vector is expected. Received: {value!r}")


def block_reducer(value: nodes.BlockReduce) -> tuple[str, Type]:
    """The C++ function that reduces the blocks of a tile, and the type of its elements."""
    reducer = value.reducer.capitalize()
    if value.init.type != INT:
        return f"reduce_blocks<{reducer}>", FLOAT
    is_flag = value.reducer in ("count", "and", "or")
    return f"reduce_int_blocks<Int{reducer}>", BOOL if is_flag else INT
