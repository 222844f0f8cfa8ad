# SPDX-License-Identifier: Apache-2.0
"""A process that has come back and fails before it has done anything ends no run."""

import pytest

from tests.support.eventually import eventually

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


def come(server):
    """The strategy of another process of the only party."""
    from tf_hips import HierarchicalPS, config

    session = server._session
    if session.is_started:  # the one before it must be gone
        eventually(lambda: not session._presence.is_there(0), changed=session.changed)
    uplink = config.Uplink(server=server.address, site="a", deadline_s=20.0)
    return HierarchicalPS(config=config.Run(run="run", uplink=uplink))


def test_who_was_started_wrongly_leaves_the_run_to_the_next(caplog):
    from tests.strategies.test_hierarchical_ps import serving

    with serving("run", parties=("a",)) as server:
        first = come(server)
        assert first.gather_objects(1, "something") == [1]
        first.client.close()  # as one that is killed

        wrong = come(server)
        assert wrong.welcome.is_back
        wrong._note_failure(ValueError("another model"))
        wrong.close("ValueError: another model")
        assert "fails before it has done anything. The run goes on without it" in caplog.text
        assert server._session.ended is None

        right = come(server)
        assert right.welcome.is_back
        right.backups.come_back({"round": 0, "gathers": 1})
        assert right.gather_objects(2, "more") == [2]
        # It has taken its place, so its error is one of the run.
        right.close("ValueError: a gradient")
        assert server._session.ended == "Site `a` left the run: ValueError: a gradient"
