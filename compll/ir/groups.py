# SPDX-License-Identifier: Apache-2.0
"""Elements that are read the other way round in groups: `v[i ^ 3]`, i the loop's element."""

from compll.ir import nodes

# Groups have one element more; tiles are made of whole ones.
_MIRRORS = (1, 3, 7)


def mirror_of(index: nodes.Expr, position: nodes.Var | None) -> int | None:
    """The number that an index joins with the element's own by `^`; None for any other index."""
    if not isinstance(index, nodes.Binary) or index.op != "^" or position is None:
        return None
    for one, other in ((index.left, index.right), (index.right, index.left)):
        is_here = isinstance(one, nodes.Ref) and one.var is position
        if is_here and isinstance(other, nodes.Const) and other.value in _MIRRORS:
            return int(other.value)
    return None
