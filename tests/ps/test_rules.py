# SPDX-License-Identifier: Apache-2.0
"""Synchronous update rules: texts, values beside plain NumPy, refusals, weights, agreement."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import DEADLINE_S, Party, parties, serving, together
from tests.ps.parties import SITES as TWO
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps import rules
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.steps import num_slots
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # every rule with every codec

Floats = npt.NDArray[np.float32]
f = np.float32
MODEL = Model(((3, 5), (), (CHUNK + 9,)))
SITES = ("a", "b", "c")
FP32 = compressors.parse("fp32")


@pytest.mark.parametrize("name", rules.NAMES)
def test_a_rule_is_its_text(name: str) -> None:
    rule = rules.parse(name)
    assert rules.parse(rule.text) == rule
    assert rules.resolve(rule) is rule
    assert rules.resolve(f" {rule.text} ") == rule


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("momentum(0.1, nesterov=True)", "momentum(learning_rate=0.1, momentum=0.9, nesterov=True, "
         "asynchronous=False)"),
        ("dc_asgd(adaptive=True)", "dc_asgd(learning_rate=0.01, compensation=2, adaptive=True, "
         "decay=0.95, compat=False)"),
        ("fedasync(staleness=hinge)", "fedasync(alpha=0.6, staleness=hinge, a=1e+01, b=4)"),
        ("fedasync(staleness=constant)", "fedasync(alpha=0.6, staleness=constant)"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_filled_in(text: str, canonical: str) -> None:
    assert rules.parse(text).text == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("momentun", "did you mean momentum"),
        ("momentum(rate=0.1)", "takes learning_rate, momentum, nesterov, asynchronous. Received"),
        ("sgd(learning_rate=0)", "`learning_rate` must be in"),
        ("sgd(learning_rate=nan)", "`learning_rate` must be in"),
        ("sgd(0.1, 0.2)", "takes 1 arguments"),
        ("sgd(0.1, learning_rate=0.2)", "must be given once"),
        ("sum(1)", "takes 0 arguments"),
        ("fedbuff(k=2.5)", "`k` must be an integer"),
        ("momentum(nesterov=perhaps)", "one of False, True"),
        ("dc_asgd(decay=0.5)", "`decay` means nothing"),
        ("dc_asgd(adaptive=True, compat=True)", "exclude each other"),
        ("fedasync(staleness=constant, a=1)", "`a` means nothing"),
        ("sgd(__import__('os'))", "must read like"),
        ("sgd(" + "1" * 400 + ")", "must read like"),
    ],
)
def test_a_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rules.parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "known"),
    [
        (compressors.parse, "topk(width=3)", "ratio"),
        (compressors.parse, "onebit(width=3)", "no parameters"),
        (compressors.parse, "momentum(onebit, width=3)", "beta"),
        (compressors.parse, "mixed(onebit, width=3)", "below"),
        (compressors.parse, "warmup(onebit, width=3)", "steps, stages, start"),
        (compressors.parse, "budget(width=3)", "wan_mbps, max_sync_s"),
        (rules.parse, "asgd(width=3)", "learning_rate"),
        (rules.parse, "krum(width=3)", "f"),
        (rules.parse, "sketched(width=3) >> krum", "k"),
        (rules.parse, "detox(width=3) >> krum", "r, vote, buckets, fixed, epsilon, q, full"),
    ],
)
def test_who_takes_no_such_parameter_says_which_it_takes(
    parse: Callable[[str], object], text: str, known: str
) -> None:
    name = text.partition("(")[0]
    with pytest.raises(ValueError, match=rf"^`{name}` takes {known}\. Received: width=3$"):
        parse(text)


def test_the_page_names_every_rule_with_its_parameters() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/rules.md").read_text(encoding="utf-8")
    missing = [name for name in rules.NAMES if f"| `{rules.parse(name).text}` |" not in page]
    assert not missing


def store_of(text: str, **settings: Any) -> Store:
    updates = Updates([chunk.size for chunk in MODEL.chunks], rules.parse(text))
    return Store(MODEL, SITES, FP32, FP32, 7, updates=updates, **settings)


@functools.cache  # most of what a test of a rule takes
def gradient(number: int, child: int, chunk: int) -> Floats:
    generator = np.random.default_rng((number, child, chunk))
    values = generator.standard_normal(MODEL.chunks[chunk].size, np.float32)
    values.flags.writeable = False
    return values


def packet(values: Floats) -> npt.NDArray[np.uint8]:
    return native.encode(FP32, values, native.Key(0, 0, 0))


def one_round(store: Store, number: int) -> list[Floats]:
    store.begin(number)
    for child in reversed(range(len(SITES))):
        for chunk in range(len(MODEL.chunks)):
            store.add(number, child, [(chunk, packet(gradient(number, child, chunk)))])
    results = dict(store.results(number, 0)[1])
    return [
        native.decode(FP32, results[chunk], where.size) for chunk, where in enumerate(MODEL.chunks)
    ]


def summed(values: list[Floats]) -> Floats:
    return values[0] + values[1] + values[2]


def mean(values: list[Floats]) -> Floats:
    return f(1 / 3) * summed(values)


# Each takes the gradients of all children, round by round, and yields steps: plain NumPy.


def sum_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    yield from map(summed, rounds)


def mean_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    yield from map(mean, rounds)


def sgd_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    for values in rounds:
        yield f(0.1) * summed(values)


def fedavg_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    for values in rounds:
        yield f(0.5) * mean(values)


def middle_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    for values in rounds:
        yield np.sort(np.stack(values), axis=0)[1]


def meamed_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    for values in rounds:
        low, middle, high = np.sort(np.stack(values), axis=0)
        yield (middle + np.where(middle - low > high - middle, high, low)) / f(2)


def majority_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    for values in rounds:
        yield np.sign(np.sign(np.stack(values)).sum(axis=0))


def velocity(
    merge: Callable[[list[Floats]], Floats], rate: float, beta: float, nesterov: bool
) -> Callable[[list[list[Floats]]], Iterator[Floats]]:
    def run(rounds: list[list[Floats]]) -> Iterator[Floats]:
        m = np.zeros_like(rounds[0][0])
        for values in rounds:
            g = merge(values)
            m = f(beta) * m + g
            yield f(rate) * (g + f(beta) * m if nesterov else m)

    return run


def adam_(rounds: list[list[Floats]]) -> Iterator[Floats]:
    m = v = np.zeros_like(rounds[0][0])
    b1, b2 = f(0.9), f(0.999)
    for t, values in enumerate(rounds, 1):
        g = summed(values)
        m = m + (g - m) * (f(1) - b1)
        v = v + (g * g - v) * (f(1) - b2)
        rate = f(float(f(0.01)) * np.sqrt(1 - float(b2) ** t) / (1 - float(b1) ** t))
        yield (m * rate) / (np.sqrt(v) + f(1e-7))


def fedopt(name: str) -> Callable[[list[list[Floats]]], Iterator[Floats]]:
    def run(rounds: list[list[Floats]]) -> Iterator[Floats]:
        b1, b2, tau = f(0.9), f(0.99), f(1e-3)
        m = np.zeros_like(rounds[0][0])
        v = np.full_like(m, tau * tau)
        for values in rounds:
            g = mean(values)
            m = g if name == "fedadagrad" else b1 * m + (f(1) - b1) * g
            if name == "fedadagrad":
                v = v + g * g
            elif name == "fedadam":
                v = b2 * v + (f(1) - b2) * (g * g)
            else:
                v = v - ((f(1) - b2) * (g * g)) * np.sign(v - g * g)
            yield (f(0.1) * m) / (np.sqrt(v) + tau)

    return run


REFERENCES = {
    "sum": sum_,
    "mean": mean_,
    "median": middle_,
    "trimmed_mean": middle_,
    "meamed": meamed_,
    "majority": majority_,
    "sgd(0.1)": sgd_,
    "fedavg(0.5)": fedavg_,
    "momentum(0.1, 0.8)": velocity(summed, 0.1, 0.8, False),
    "momentum(0.1, 0.8, nesterov=True)": velocity(summed, 0.1, 0.8, True),
    "adam(0.01)": adam_,
    "fedavgm(0.5, 0.8)": velocity(mean, 0.5, 0.8, False),
    "fedadam(0.1)": fedopt("fedadam"),
    "fedyogi(0.1)": fedopt("fedyogi"),
    "fedadagrad(0.1)": fedopt("fedadagrad"),
    "diloco": velocity(mean, 0.7, 0.9, True),
}


def test_every_synchronous_rule_has_a_reference() -> None:
    tested = {rules.parse(text).name for text in REFERENCES}
    assert tested == {name for name in rules.NAMES if not rules.parse(name).is_asynchronous}


@pytest.mark.parametrize("text", REFERENCES)
def test_rounds_equal_plain_numpy_bit_for_bit(text: str) -> None:
    store = store_of(text)
    found = [one_round(store, number) for number in range(4)]
    for chunk in range(len(MODEL.chunks)):
        rounds = [[gradient(n, child, chunk) for child in range(3)] for n in range(4)]
        for number, expected in enumerate(REFERENCES[text](rounds)):
            np.testing.assert_array_equal(
                found[number][chunk].view(np.uint32), expected.view(np.uint32)
            )
    # Memory: an array of the model's size for each slot.
    held = sum(values.size for _, _, _, values in store.slots())
    assert held == num_slots(rules.parse(text)) * MODEL.num_elements


@pytest.mark.tf
@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("adam(0.01)", "Adam", {"learning_rate": 0.01}),
        ("momentum(0.1, 0.8)", "SGD", {"learning_rate": 0.1, "momentum": 0.8}),
        (
            "momentum(0.1, 0.8, nesterov=True)",
            "SGD",
            {"learning_rate": 0.1, "momentum": 0.8, "nesterov": True},
        ),
    ],
)
def test_steps_are_those_of_keras(text: str, name: str, options: dict[str, Any]) -> None:
    import keras

    store = store_of(text)
    weights = keras.Variable(np.zeros(15, np.float32))
    optimizer = getattr(keras.optimizers, name)(**options)
    moved = np.zeros(15, np.float64)
    for number in range(5):
        optimizer.apply([summed([gradient(number, child, 0) for child in range(3)])], [weights])
        moved -= one_round(store, number)[0]
        np.testing.assert_allclose(weights.numpy(), moved, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["momentum(0.1)", "adam", "fedyogi", "diloco"])
def test_a_refused_sum_leaves_the_state_as_it_was(text: str) -> None:
    undisturbed, store = store_of(text), store_of(text)
    for number in range(3):
        store.begin(number)
        huge = np.full(MODEL.chunks[0].size, 3e38, np.float32)
        for child in (0, 1):
            store.add(number, child, [(0, packet(huge))])
        with pytest.raises(NonFiniteError, match="must be finite"):
            store.add(number, 2, [(0, packet(huge))])
        assert store.delivered(number, 2) == frozenset()
        expected = one_round(undisturbed, number)
        for one, other in zip(one_round(store, number), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_step_that_overflows_is_refused_although_its_sum_does_not() -> None:
    store = store_of("adam")
    store.begin(0)
    large = np.full(MODEL.chunks[0].size, 1e25, np.float32)  # its square is beyond float32
    for child in (0, 1):
        store.add(0, child, [(0, packet(large))])
    with pytest.raises(NonFiniteError, match="an overflow"):
        store.add(0, 2, [(0, packet(large))])
    assert not list(store.slots())


@pytest.mark.parametrize("text", ["mean", "fedavg"])
def test_a_mean_is_weighted_by_what_children_say(text: str) -> None:
    store = store_of(text)
    assert store.weigh(0, 0, 30.0)
    assert store.weigh(0, 2, 0.0)
    assert not store.weigh(0, 2, 0.0)  # it tries again
    found = one_round(store, 0)
    for chunk in range(len(MODEL.chunks)):
        expected = np.zeros(MODEL.chunks[chunk].size, np.float32)
        for child, weight in enumerate((30, 1, 0)):
            expected = expected + f(weight / 31) * gradient(0, child, chunk)
        np.testing.assert_array_equal(found[chunk], expected)
    store.begin(1)
    for child in range(3):
        store.weigh(1, child, 0.0)
    assert not any(values.any() for values in one_round(store, 1))


def test_a_weight_comes_first_and_stays() -> None:
    store = store_of("mean")
    store.weigh(0, 0, 2.0)
    with pytest.raises(ProtocolError, match=r"must stay what it was, 2\. Received: 3"):
        store.weigh(0, 0, 3.0)
    store.add(0, 1, [(0, packet(gradient(0, 1, 0)))])
    with pytest.raises(ProtocolError, match=r"site `b` in round 0 must stay what it was, 1\."):
        store.weigh(0, 1, 3.0)
    with pytest.raises(ProtocolError, match=r"Rule sgd\(learning_rate=0.1\) takes no weights"):
        store_of("sgd(0.1)").weigh(0, 0, 1.0)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "1e16", "many"])
def test_a_weight_is_a_finite_number(text: str) -> None:
    with pytest.raises(ProtocolError, match="`weight` must be a number from 0 to 1e"):
        wire.weight_from_text(text)


def test_parties_that_weigh_their_rounds(certificates: Certificates) -> None:
    with (
        serving(certificates, rule="fedavgm(1, 0.5)", compression="fp32") as server,
        parties(server, certificates, compression="fp32") as members,
    ):
        found = together(
            *(
                lambda one=one: [
                    one.client.exchange(number, one.packets(number), weight=1.0 + one.child)
                    for number in range(2)
                ]
                for one in members
            )
        )
        rounds = [
            [native.decode(FP32, one.packets(number)[: 72 * 4 + 16], 72) for one in members]
            for number in range(2)
        ]
        m = np.zeros(72, np.float32)
        for number, (a, b) in enumerate(rounds):
            m = f(0.5) * m + (f(1 / 3) * a + f(2 / 3) * b)
            for child in (0, 1):
                first = native.decode(FP32, found[child][number][: 72 * 4 + 16], 72)
                np.testing.assert_array_equal(first, m)


def test_what_comes_down_where_a_threshold_goes_up(certificates: Certificates) -> None:
    """Steps would not reach it for many rounds, whoever brings the rule."""
    text = "error_feedback(hips2bit(threshold=0.01))"
    for server_rule, party_rule, down in (
        ("asgd(0.001)", None, "fp32"),
        ("asgd(1)", None, text),
        (None, "sgd(0.001)", "fp32"),
        (None, "mean", text),
        (None, None, text),
    ):
        with serving(
            certificates, parties=("a",), rule=server_rule, compression=text, downlink="same"
        ) as server:
            one = Party(server.address, "a", certificates.party("a"), compression=text)
            welcome = one.client.join(text, "same", 7, party_rule)
            assert welcome.downlink == down
            one.client.agree_model([(4,)])
            gradient = np.full(4, 0.1, np.float32)
            codec, kept = compressors.parse(text), np.zeros(4, np.float32)
            packet = native.encode(codec, gradient, native.Key(0, 0, 0), kept=kept)
            answer = one.client.exchange(0, packet)
            came = native.decode(compressors.parse(welcome.downlink), answer, 4)
            assert (came > 0).all()
            one.client.close()


def test_a_server_that_was_told_same_holds_its_parties_to_it(certificates: Certificates) -> None:
    text = "error_feedback(hips2bit(threshold=0.01))"
    with serving(certificates, parties=("a",), compression=text, downlink="same") as server:
        for rule, down in (("sum", "fp32"), ("sgd(0.1)", text)):
            one = Party(server.address, "a", certificates.party("a"), compression=text)
            with pytest.raises(ProtocolError, match=r"`downlink` must be .* was told"):
                one.client.join(text, down, 7, rule)


@pytest.mark.parametrize("is_told", [True, False])
def test_same_is_one_thing_in_a_tree(certificates: Certificates, is_told: bool) -> None:
    text = "error_feedback(hips2bit(threshold=0.01))"
    told = {"compression": text, "downlink": "same"} if is_told else {}
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(
            serving(certificates, insecure=True, parties=("west", "e"), rule="sgd(0.1)", **told)
        )
        above = Uplink(top.address, "west", None, DEADLINE_S)
        west = stack.enter_context(
            serving(certificates, insecure=True, parties=("w",), uplink=above)
        )
        below = Party(west.address, "w", None, compression=text)
        beside = Party(top.address, "e", None, compression=text)
        found = together(
            lambda: below.client.join(text, "same", 7),
            lambda: beside.client.join(text, "same", 7),
        )
        assert [one.downlink for one in found] == ["fp32", "fp32"]
        below.client.close()
        beside.client.close()


def test_parties_and_the_server_agree_on_the_rule(certificates: Certificates) -> None:
    with serving(certificates, rule="adam") as server:
        one = Party(server.address, "a", certificates.party("a"))
        text = "`rule` must be adam.*which the server was told. Received: rule=sgd"
        with pytest.raises(ProtocolError, match=text):
            one.client.join("fp32", "same", 7, "sgd")
        two = [Party(server.address, site, certificates.party(site)) for site in TWO]
        # Who names none takes the server's.
        told = together(
            lambda: two[0].client.join("fp32", "same", 7),
            lambda: two[1].client.join("fp32", "same", 7, "adam(learning_rate=0.001)"),
        )
        assert {welcome.rule for welcome in told} == {rules.parse("adam").text}
        for member in two:
            member.client.close()
    with serving(certificates) as server:
        one, other = (Party(server.address, site, certificates.party(site)) for site in TWO)

        session = server._session

        def joined() -> None:
            eventually(lambda: 0 in session._members.children, 20, changed=session.changed)
            with pytest.raises(ProtocolError, match=r"must agree on `rule`\. Site `a` has sum"):
                other.client.join("fp32", "same", 7, "sgd")
            late = Party(server.address, "b", certificates.party("b"), compression="fp32")
            late.join()
            late.client.close()

        together(lambda: one.client.join("fp32", "same", 7), joined)
        one.client.close()


def test_a_rule_that_is_none_is_refused_where_it_is_told() -> None:
    from tf_hips.ps.session.settings import ServerConfig

    with pytest.raises(ConfigError, match="a rule must be one of"):
        ServerConfig(parties=TWO, insecure=True, rule="smu")
