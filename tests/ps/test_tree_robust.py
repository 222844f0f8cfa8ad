# SPDX-License-Identifier: Apache-2.0
"""Party servers with a robust rule of their own below a synchronous one: a liar in each party."""

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import DEADLINE_S, serving, together
from tests.ps.test_restart import Later
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import robust
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PeerError, ProtocolError, StateError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.rules.robust import robust_weight
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.first_sync import FirstSync
from tf_hips.ps.session.members import Caller, Child, Terms
from tf_hips.ps.session.settings import ServerConfig, terms_of
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Waiting
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Recorder
from tf_hips.ps.terms.tree import Place

pytestmark = pytest.mark.heavy  # servers start in most of these

SHAPES = ((40, 7), (8,))
MODEL = Model(SHAPES)
FP32 = compressors.parse("fp32")
SIZES = [chunk.size for chunk in MODEL.chunks]
TREE = Node(
    "",
    tuple(
        Node(site, tuple(f"{site}{n}" for n in range(4)), up="fp32")
        for site in ("west", "east", "north")
    ),
    up="fp32",
)
Floats = npt.NDArray[np.float32]


def packets_of(vector: Floats) -> npt.NDArray[np.uint8]:
    parts = np.split(vector, np.cumsum(SIZES)[:-1])
    return np.concatenate([native.encode(FP32, part, native.Key(0, 0, 0)) for part in parts])


def vector_of(packets: npt.NDArray[np.uint8]) -> Floats:
    cuts = np.cumsum(MODEL.packet_bytes(FP32))[:-1]
    parts = zip(np.split(packets, cuts), SIZES, strict=True)
    return np.concatenate([native.decode(FP32, part, size) for part, size in parts])


def honest(leaf: int, number: int) -> Floats:
    generator = np.random.default_rng((leaf, number))
    return 1.0 + 0.1 * generator.standard_normal(sum(SIZES)).astype(np.float32)


@pytest.mark.parametrize(
    ("local", "above"),
    [
        ("geometric_median(f=1)", "mean"),
        pytest.param("nnm(f=1) >> trimmed_mean(f=1)", "fedavg(0.5)", marks=pytest.mark.slow),
        ("trimmed_mean(f=1)", "trimmed_mean(f=1)"),
        pytest.param(
            "centred_clipping(f=1, tau=0.5)", "geometric_median(f=1)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_liar_in_each_party(certificates: Certificates, local: str, above: str) -> None:
    """And where the rule above is robust, the server of a whole party lies, too."""
    liars = {1, 6, 8} | ({4, 5, 7} if robust_above(above) else set())
    with (
        serving_tree(certificates, TREE, rule=above, below={"rule": local}) as servers,
        leaves_of(certificates, TREE, addresses_of(servers), shapes=SHAPES) as members,
    ):
        told = servers["west"].snapshot()
        assert told["robust"] is not None and told["bears"] == "1 of 4 children in a round"
        # A leaf may say that it has no row, though what it hears of the rule above is a mean.
        assert all(one.client._welcome.bears_refusals for one in members)
        before: dict[int, Floats] = {}
        for number in range(2):
            rows = [honest(leaf, number) for leaf in range(12)]
            for leaf in liars:
                rows[leaf] = np.full_like(rows[leaf], -50.0)
            got = together(
                *(
                    # Who lies says that it stands for much, too.
                    lambda m=m, k=k, n=number, r=rows: m.client.exchange(
                        n, packets_of(r[k]), 1e12 if k in liars else 2.0
                    )
                    for k, m in enumerate(members)
                )
            )
            assert all(np.array_equal(one, got[0]) for one in got)
            parties = []
            for place in range(3):
                rule = robust.parse(local)
                merged = rule(rows[4 * place : 4 * place + 4], reference=before.get(place))
                before[place] = merged
                parties.append(merged)
            found = vector_of(got[0])
            name = above.partition("(")[0]
            wanted = (
                robust.parse(above)(parties)
                if robust_above(above)
                else np.mean(parties, axis=0) * (0.5 if name == "fedavg" else 1.0)
            )
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
            assert np.abs(found / (0.5 if name == "fedavg" else 1.0) - 1.0).max() < 0.5


def test_a_leaf_that_describes_other_first_weights_is_refused_alone(
    certificates: Certificates,
) -> None:
    """Though it comes first: its server asks above for what most leaves say."""
    weights = [np.ones((3, 2), np.float32)]
    with (
        serving_tree(certificates, TREE, rule="mean", below={"rule": "median"}) as servers,
        leaves_of(certificates, TREE, addresses_of(servers), shapes=SHAPES) as members,
    ):
        liar, session = members[5], servers["east"]._session
        lies = Later(lambda: liar.client.first_sync([np.zeros(7, np.float32)]))
        eventually(lambda: session.first_sync._said, DEADLINE_S, changed=session.changed)
        honest = [one for one in members if one is not liar]
        for got in together(*(lambda one=one: one.client.first_sync(weights) for one in honest)):
            np.testing.assert_array_equal(got[0], weights[0])
        with pytest.raises(ProtocolError, match=r"The server above .* and site `east1` .here. dif"):
            lies.result()
        liar.client.first_sync(weights)
        rows = [np.full(sum(SIZES), 1.0, np.float32)] * 12
        together(
            *(
                lambda m=m, row=row: m.client.exchange(0, packets_of(row))
                for m, row in zip(members, rows, strict=True)
            )
        )


def test_without_a_majority_the_first_leaf_says_which_first_weights_come() -> None:
    terms = Terms(("a", "b", "c", "d"), "fp32", "fp32", 1 << 20, robust="median", site="west")
    state = State(terms, threading.Condition(), Recorder())
    for place, site in enumerate(terms.parties):
        state.members.children[place] = Child("p", 1, "fp32", "fp32", 7, leaves=((site, 1),))
    leaves = (("z", 1), *((site, 1) for site in terms.parties))
    state.start(Place(1, leaves, "fp32", "fp32", "mean", "run", 0, 5))
    waiting = Waiting(state.changed, state.members, lambda: None)
    sync = FirstSync(state, state.changed, waiting, lambda caller: None, lambda: None)
    for child, num_bytes in enumerate((8, 4, 4, 12)):
        assert sync.wanted is None
        with pytest.raises(PeerError, match="have not begun" if child < 3 else "server above"):
            sync.begin(Caller(child, "p", 0.0), ["float32[1]"], num_bytes)
    assert sync.wanted == (("float32[1]",), 8)


def robust_above(text: str) -> bool:
    return text.partition("(")[0] in robust.NAMES and text != "mean"


def test_a_weight_is_that_of_most() -> None:
    assert robust_weight([2.0, 1e12, 2.0, 3.0]) == 8.0
    assert robust_weight([0.0, -0.0]) == 0.0
    assert robust_weight([5.0, 0.0, 7.0]) == 10.0


@pytest.mark.parametrize(
    "above",
    [
        "sum",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("sgd(0.1)", "asgd", "median >> fedbuff(1)")
        ),
    ],
)
def test_the_server_above_must_take_means(certificates: Certificates, above: str) -> None:
    node = Node("", (Node("west", ("a", "b", "c"), up="fp32"),), up="fp32")
    with (
        serving_tree(certificates, node, rule=above, below={"rule": "median"}) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES, joins=False) as members,
        pytest.raises(Exception, match="rule of the server above must take means"),
    ):
        together(*(one.join for one in members))


def test_what_cannot_be_is_refused(certificates: Certificates) -> None:
    uplink = Uplink("127.0.0.1:1", "west", None)
    common = {"insecure": True, "uplink": uplink, "parties": ("a", "b", "c")}
    for rule, told in (
        ("median >> fedavg", "a synchronous `rule` must be a robust one alone"),
        ("krum(f=1)", r"krum needs n >= 2 f \+ 3"),
        ("median(f=2)", r"needs n >= 2 f \+ 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            ServerConfig(**common, rule=rule)
    with pytest.raises(ConfigError, match="`period` needs `uplink` and an asynchronous"):
        ServerConfig(**common, rule="median", period=3)
    terms = terms_of(ServerConfig(**common, rule="median"))
    assert (terms.rule, terms.robust) == (None, "median(f=auto)")
    node = Node("", (Node("west", ("a", "b", "c"), sends="dgc", up="fp32"),), up="fp32")
    with (
        serving_tree(certificates, node, rule="mean", below={"rule": "median"}) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES, joins=False) as members,
        pytest.raises(ProtocolError, match="packets of all elements"),
    ):
        together(*(one.join for one in members))


def test_a_state_of_another_rule_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    def config(rule: str | None, above: str) -> ServerConfig:
        uplink = Uplink(above, "west", None)
        return ServerConfig(
            parties=("a", "b", "c"),
            insecure=True,
            uplink=uplink,
            rule=rule,
            state_dir=str(tmp_path),
        )

    with serving(certificates, insecure=True, parties=("west",)) as top:
        server = Server(config("median", top.address))
        server.start()
        server.stop(0.0)
        with pytest.raises(StateError, match="rule"):
            Server(config("geometric_median", top.address)).start()
