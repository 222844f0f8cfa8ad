# SPDX-License-Identifier: Apache-2.0
"""Update rules: what a server makes of gradients, in rounds of all children or of each by itself.

    value      which rule, with which parameters: a text that travels
    rule       what one chunk's rule is asked for in a round
    merging    the packets of all children, added up or averaged
    robust     the same where some children may lie, of each coordinate
    whole      the same by a look at whole rows, when a round is complete
    leaves     the same by sketches of the rows of all leaves: who may be in such a tree
    steps      merged gradient and state in, step and new state out
    updates    the states of all chunks, for synchronous rounds
    arrivals   one child's gradient and the total of all steps in, the new total out
    buffers    the same where some may lie: rows of several children first, each once
    votes      what stands before a robust rule where workers in groups compute the same
    way_down   what the way down is encoded by where nobody has chosen
    joint      what shards of one model tell each other, to rule together

Formulas, sources and memory stand in docs/rules.md. Imports no TensorFlow, opens no socket.
"""

from tf_hips.ps.rules.robust import why_not, why_weak
from tf_hips.ps.rules.value import NAMES, UpdateRule, parse, resolve

__all__ = ["NAMES", "UpdateRule", "parse", "resolve", "why_not", "why_weak"]
