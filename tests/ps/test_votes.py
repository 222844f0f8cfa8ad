# SPDX-License-Identifier: Apache-2.0
"""A server whose children vote in groups: results of `robust.detox`, and who lies."""

import itertools

import numpy as np
import pytest

from tests.ps.parties import together
from tests.ps.voters import (
    SITES,
    Behaviour,
    Floats,
    children,
    expected,
    gradient,
    one_round,
    rows_of,
    secret_of,
    voting,
)
from tf_hips import robust
from tf_hips.errors import ConfigError, PeerError, ProtocolError
from tf_hips.ps import rules
from tf_hips.ps.settings import ServerConfig
from tf_hips.robust import detox
from tf_hips.robust.detox import Detox


def reverse(number: int, own: Floats) -> Floats:
    """What a liar sends."""
    return -100 * own


@pytest.mark.parametrize("vote", ["digest", "exact", "tolerant"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_seven_children_one_of_whom_lies_are_what_the_function_makes_of_them(
    vote: str, is_fixed: bool
) -> None:
    chosen = Detox(3, robust.median(), vote, is_fixed=is_fixed)
    rule = rules.resolve(chosen).text
    with voting(rule, {"c": Behaviour(reverse)}) as (server, members):
        for number in range(3):
            found = one_round(members, number)
            rows = rows_of(members, number)
            np.testing.assert_array_equal(found, expected(server, chosen, number, rows))
        counts = children(server)
        alone = sum(
            detox.groups(7, 3, secret_of(server), number, is_fixed=is_fixed)[-1] == (2,)
            for number in range(3)
        )
        # Who sits alone outvotes itself never.
        assert counts["c"]["outvoted"] == 3 - alone
        assert all(one["outvoted"] == 0 for site, one in counts.items() if site != "c")
        assert all(one["proven"] == 0 for one in counts.values())
