# SPDX-License-Identifier: Apache-2.0
"""What a run consists of: members, first weights, gathers, rounds. What a server has to keep.

A session changes it on behalf of calls; `apply` changes it in the same way on behalf of records,
without waiting and without limits, for what was accepted once is accepted again. Who is connected,
who waits and how long belongs to the session: it begins anew with every server.

Not thread-safe: the session's lock guards it.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tf_hips import log
from tf_hips.errors import NonFiniteError
from tf_hips.ps.robust.buffered import BufferedStore
from tf_hips.ps.robust.choices import Choices
from tf_hips.ps.robust.election import Electing
from tf_hips.ps.robust.joint import JointStore
from tf_hips.ps.robust.rejections import Rejections
from tf_hips.ps.robust.sketched_party import SketchingStore
from tf_hips.ps.robust.sketched_top import AddingUpdates, WeighingStore
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rounds.gather import Gathers
from tf_hips.ps.rounds.partial import Partial
from tf_hips.ps.rounds.periods import Above, PeriodicStore
from tf_hips.ps.rounds.round import Rounds
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules import parse
from tf_hips.ps.rules.joint import Verdict
from tf_hips.ps.rules.robust import OWN_REFUSAL, is_refused, why_noisy, why_unbounded, why_weak
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.whole import Distances, rule_of
from tf_hips.ps.session.members import Child, Members, Terms
from tf_hips.ps.terms import tree
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.quorum import NEXT
from tf_hips.ps.terms.recorder import Entry, Kind, Recorder
from tf_hips.ps.terms.tree import Place
from tf_hips.ps.terms.weights import FirstWeights
from tf_hips.ps.transport.wire import Buffer


class State:
    """The state of one run, and what is told of its changes."""

    def __init__(self, terms: Terms, changed: threading.Condition, recorder: Recorder) -> None:
        """Nobody has joined.

        Args:
            terms: what the server was told.
            changed: the session's lock, and the store's.
            recorder: what is told of everything that is accepted.
        """
        self.members = Members(terms)
        self.weights = FirstWeights()
        self.gathers = Gathers(len(terms.parties), terms.max_gather_bytes, terms.past_bytes)
        self.store: Store | AsynchronousStore | None = None
        self.recorder = recorder
        self.changed = changed
        self.has_left_above = False
        self.rejections = Rejections(terms.parties)
        self.choices = Choices(terms.parties)
        self.electing = Electing(terms.parties, self.rejections, self.choices)

    def start(self, place: Place | None = None) -> None:
        """All children have joined, and the server above, if there is one, says where they are."""
        self.members.is_started = True
        self.members.session = uuid.uuid4().hex[:16]
        self._take_place(place)
        members = self.members
        self.electing.begin(members.votes, has_sketches=members.has_sketches)
        self.recorder.add(Kind.JOINED, **self._joined())
        self._look_at_workers()
        self._look_at_rule()

    def _look_at_rule(self) -> None:
        """Warns of a rule that bears nobody, or where the children's codec hides who lies."""
        text = self.members.doubting_rule
        if text is None:
            return
        terms, compression = self.members.terms, self.members.children[0].compression
        is_new = terms.rule is None and terms.robust is None  # else the server began by saying it
        weak = why_weak(text, len(terms.parties), terms.quorum) if is_new else None
        for why in (weak, why_unbounded(text), why_noisy(text, compression)):
            if why is not None:
                log.warning("%s", why)

    def _look_at_workers(self) -> None:
        """Names children that claim far more workers or leaves than others, where some may lie.

        Nothing can check these numbers, and data are dealt out by that of the workers.
        """
        members = self.members
        if members.doubting_rule is None:
            return
        children = [child for _, child in sorted(members.children.items())]
        counts = [child.workers for child in children]
        for place, median in tree.far_larger(counts):
            log.warning(
                "Site %s says that it has %d workers; the median of the others is %d. Its share of "
                "the data is as large, and what it claims is not checked. If it is wrong, start "
                "the run again without this site",
                members.site(place),
                counts[place],
                median,
            )
        widths = [len(child.leaves) for child in children]
        for place, median in tree.far_larger(widths):
            log.warning(
                "Site %s says that it stands for %d parties; the median of the others is %d. What "
                "it claims is not checked. If it is wrong, start the run again without this site",
                members.site(place),
                widths[place],
                median,
            )

    def _take_place(self, place: Place | None) -> None:
        self.members.place = place
        widths = []
        for position, child in sorted(self.members.children.items()):
            widths.append(None if self.members.is_leaf(position) else len(child.leaves))
            if place is not None and not self.members.has_own_rule:
                child.rule = place.rule
        self.gathers.shape(widths, is_passed_up=place is not None)

    def take_back(self, position: int, process: str) -> None:
        """Another process of a child goes on where the one before it has ended."""
        child = self.members.children[position]
        child.process = process
        child.num_returns += 1
        if self.store is None:
            child.model = None  # it tells it again
        self.recorder.add(Kind.RETURNED, child=position, process=process)

    def note_lost(self, position: int, *, is_lost: bool) -> None:
        """Others go on without a child, or it is there again."""
        child = self.members.children[position]
        if child.is_lost != is_lost:
            child.is_lost = is_lost
            if is_lost and isinstance(self.store, VotingStore):
                self.store.lose(position)
            self.recorder.add(Kind.LOST, child=position, is_lost=is_lost)

    def note_backup(self, position: int, number: int, gather: int) -> None:
        """A child can come back to round `number` and gather `gather` from now on."""
        self.members.children[position].backup = number, gather
        self.recorder.add(Kind.BACKED_UP, child=position, round=number, number=gather)
        self.forget_past()

    def leave_above(self) -> None:
        """The server above knows that the run is over here."""
        self.has_left_above = True
        self.recorder.add(Kind.LEFT_ABOVE)

    def agree(self, position: int, model: Model, first_round: int) -> None:
        """Takes a child's model; with the last one's there is a store."""
        child = self.members.children[position]
        if (child.model, child.first_round) == (model, first_round):
            return
        child.model, child.first_round = model, first_round
        self.recorder.add(Kind.MODEL, child=position, shapes=model.shapes, round=first_round)
        if not self.members.without_model():
            self.gathers.end_prologue()
            self.store = self._make_store(child, model, first_round)

    @property
    def is_asynchronous(self) -> bool:
        """Whether children go on without each other."""
        return isinstance(self.store, AsynchronousStore)

    def part(self, child: int, reason: str) -> bool:
        """Lets the others of an asynchronous run go on without `child`; whether they can.

        They need nobody but child 0, and that until it has sent the first weights.
        """
        store = self.store
        if not isinstance(store, AsynchronousStore):
            return False
        one = self.members.children[child]
        if not one.has_left:
            one.has_left = True
            self.recorder.add(Kind.LEFT, child=child, reason=reason)
        return not self.members.have_left and (
            child != 0 or store.progress(0)[0] >= store.of(0).first_round
        )

    def begin_round(self, rounds: Rounds, number: int, child: int) -> bool:
        """Makes a round of a child ready for packets; whether it is new."""
        if not rounds.begin(number):
            return False
        whose: dict[str, Any] = {"child": child} if self.is_asynchronous else {}
        self.recorder.add(Kind.ROUND, round=number, **whose)
        return True

    def archive(self) -> None:
        """Moves rounds that are over into the past; the lock need not be held."""
        store = self.store
        if store is None:
            return
        store.archive()
        with self.changed:
            children = self.members.children.items()
            here = [store.of(place) for place, child in children if not child.has_left]
            # Who begins with the first weights does all rounds again; and above they may be owed.
            is_owed = isinstance(store, PeriodicStore) and store.next_up == 0
            are_over = here and all(one.oldest > one.first_round for one in here)
            if self.weights.held and are_over and not is_owed:
                self.weights.forget()

    def weigh(self, store: Rounds, number: int, child: int, weight: float) -> None:
        """Notes what a child stands for in a round."""
        if store.weigh(number, child, weight):
            self.recorder.add(Kind.WEIGHT, round=number, child=child, weight=weight)
            if is_refused(weight) and self._has_robust_chunks:
                self.rejections.note(number, {child: OWN_REFUSAL})

    @property
    def _has_robust_chunks(self) -> bool:
        """Whether a robust rule merges here chunk by chunk; of whole rounds the ruling tells."""
        own = self.members.terms.robust
        if own is None and self.members.place is not None:
            return False
        rule = parse(own if own is not None else self.members.children[0].rule)
        return rule.is_robust and not rule.is_whole

    def apply(self, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
        """Does what a record says.

        Raises:
            Exception: it says what cannot be.
        """
        match kind:
            case Kind.JOINED:
                for position, child in enumerate(fields["children"]):
                    leaves = child.get("leaves") or [
                        [self.members.site(position), child["workers"]]
                    ]
                    child["leaves"] = tuple((site, count) for site, count in leaves)
                    child["paths"] = tuple(child.get("paths", ()))
                    child["guards"] = tree.as_guards(child.get("guards", ()))
                    self.members.children[position] = Child(**child)
                self.members.is_started = True
                self.members.session = fields["session"]
                place = fields.get("place")
                self._take_place(place and Place.from_fields(place))
                members, secret = self.members, fields.get("secret")
                self.electing.begin(members.votes, secret, has_sketches=members.has_sketches)
                self.gathers.prologue = fields.get("prologue", 0)
                if not fields.get("has_weights", True):
                    self.weights.forget()
            case Kind.MODEL:
                model = Model.from_json(fields["shapes"])
                self.agree(fields["child"], model, fields["round"])
            case Kind.DESCRIBED:
                self.weights.describe(fields["kinds"], fields["bytes"])
            case Kind.WEIGHTS:
                self.weights.take(fields["position"], data)
            case Kind.GATHERED:
                self.gathers.restore(
                    fields["child"], fields["number"], fields["label"], memoryview(data)
                )
            case Kind.ANSWERED:
                self.gathers.take_answer(
                    fields["number"], tree.unbundle(memoryview(data), fields["count"])
                )
            case Kind.LEFT_ABOVE:
                self.has_left_above = True
            case Kind.LEFT:
                self.members.children[fields["child"]].has_left = True
            case Kind.LOST:
                self.members.children[fields["child"]].is_lost = fields["is_lost"]
            case Kind.GATHER_CLOSED:
                self.gathers.close(fields["number"], fields["children"])
            case Kind.RETURNED:
                self.take_back(fields["child"], fields["process"])
            case Kind.BACKED_UP:
                self.note_backup(fields["child"], fields["round"], fields["number"])
            case Kind.REPLICA:
                self.electing.hear(fields["child"], fields["facts"])
            case _:
                self._apply_to_rounds(kind, fields, data)

    def capture(self) -> Iterator[Entry]:
        """What `apply` makes this state of, just after a round has begun; holds merges back.

        Only residuals and what the rule keeps are read later; until then no chunk may be merged:
        `Store.release`.
        """
        store = self.store
        if store is None:
            raise ValueError("A snapshot needs a round.")
        children = self.members.children
        joined = self._joined() | {
            "prologue": self.gathers.prologue,
            "has_weights": not self.weights.is_forgotten,
        }
        small: list[Entry] = [(Kind.JOINED, joined, b"")]
        for position, child in sorted(children.items()):
            fields = {"shapes": store.model.shapes, "round": child.first_round}
            small.append((Kind.MODEL, {"child": position, **fields}, b""))
            if child.has_left:
                small.append((Kind.LEFT, {"child": position}, b""))
            if child.is_lost:
                small.append((Kind.LOST, {"child": position, "is_lost": True}, b""))
            if child.backup is not None:
                number, gather = child.backup
                backup = {"child": position, "round": number, "number": gather}
                small.append((Kind.BACKED_UP, backup, b""))
        small += self.electing.entries()
        small += self._first_weights()
        small += [
            (Kind.GATHERED, {"child": child, "number": number, "label": label}, payload)
            for child, number, label, payload in self.gathers.kept()
        ]
        small += [
            (Kind.GATHER_CLOSED, {"number": number, "children": children}, b"")
            for number, children in self.gathers.closed()
        ]
        small += [
            (Kind.ANSWERED, {"number": number, "count": len(answer)}, tree.bundle(answer))
            for number, answer in self.gathers.answers()
        ]
        if isinstance(store, AsynchronousStore):
            return itertools.chain(small, store.capture())
        number, results = store.hold()
        small.append((Kind.NEWEST, {"round": number}, b""))
        small += [
            (Kind.RESULT, {"round": number - 1, "chunk": chunk}, packet.data)
            for chunk, packet in results
        ]
        small += _partial_entries(store.partial)
        small += store.entries() if isinstance(store, JointStore) else ()
        return itertools.chain(
            small,
            (
                (Kind.RESIDUAL, {"chunk": chunk}, residual.data.cast("B"))
                for chunk, residual in store.residuals()
            ),
            (
                (Kind.SLOT, {"chunk": chunk, "slot": slot, "count": count}, values.data.cast("B"))
                for chunk, slot, count, values in store.slots()
            ),
        )

    def _apply_to_rounds(self, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
        store = self.store
        if store is None:
            raise ValueError("it comes before the model")
        child = fields.get("child", 0)  # rounds of synchronous runs are everybody's
        match kind:
            case Kind.ROUND:
                store.of(child).begin(fields["round"])
                self.archive()
            case Kind.PACKET:
                # A sum that is refused now was refused then, and its packets with it.
                with contextlib.suppress(NonFiniteError):
                    store.of(child).add(fields["round"], child, [(fields["chunk"], data)])
            case Kind.WEIGHT:
                store.of(child).weigh(fields["round"], child, fields["weight"])
            case _ if isinstance(store, AsynchronousStore):
                store.restore(kind, fields, data)
            case Kind.VOTED | Kind.TALLIED if isinstance(store, VotingStore):
                store.redo(kind, fields, data)
            case Kind.RULED if isinstance(store, JointStore):
                store.rule(fields["round"], Verdict.from_bytes(bytes(data), store.num_children))
            case Kind.SKETCHED if isinstance(store, WeighingStore):
                with contextlib.suppress(NonFiniteError):
                    store.add(fields["round"], child, [(store.sketch_chunk, data)])
            case Kind.WEIGHED if isinstance(store, SketchingStore):
                store.take_weights(fields["round"], data)
            case Kind.CLOSED:
                late = [(child, number) for child, number in fields["late"]]
                store.merge(store.close(fields["round"], fields["children"], late))
            case Kind.MISSED | Kind.LATE if store.partial is not None:
                _restore_partial(store.partial, kind, fields, data)
            case Kind.PASSED_DOWN:
                store.finish(fields["round"], fields["chunk"], data)
            case Kind.NEWEST:
                store.restore_round(fields["round"])
            case Kind.RESULT:
                store.restore_result(fields["round"], fields["chunk"], data)
            case Kind.RESIDUAL:
                store.restore_residual(fields["chunk"], data)
            case Kind.SLOT:
                store.restore_slot(fields["chunk"], fields["slot"], fields["count"], data)
            case _:
                raise ValueError(f"its kind is {kind!r}")

    def _first_weights(self) -> Iterator[Entry]:
        weights = self.weights
        if weights.held:
            yield Kind.DESCRIBED, {"kinds": weights.kinds, "bytes": weights.num_bytes}, b""
            for position, piece in weights.pieces():
                yield Kind.WEIGHTS, {"position": position}, piece

    def forget_past(self) -> None:
        """Forgets rounds and gathers that nobody can come back to."""
        number, gather = self.members.needed()
        self.gathers.need(gather)
        if isinstance(self.store, AsynchronousStore):
            for place, child in self.members.children.items():
                lane = self.store.of(place)
                own = child.first_round if child.backup is None else child.backup[0]
                lane.past.need(lane.round if child.has_left else own)
        elif self.store is not None:
            self.store.past.need(number)

    def _make_store(
        self, child: Child, model: Model, first_round: int
    ) -> Store | AsynchronousStore:
        """The rounds of children that all have joined on the terms of `child`."""
        place = self.members.place
        rule = parse(child.rule)
        up = model.compressor(child.compression)
        is_passed = place is not None and not self.members.has_own_rule
        down = model.compressor(place.compression if place and is_passed else child.downlink)
        common: dict[str, Any] = {
            "changed": self.changed,
            "recorder": self.recorder,
            "shard": self.members.terms.shard,
        }
        past_bytes = self.members.terms.past_bytes
        terms = model, self.members.terms.parties, up, down, child.seed
        if rule.is_asynchronous and not is_passed:
            firsts = [one.first_round for _, one in sorted(self.members.children.items())]
            common |= {"first_rounds": firsts, "past_bytes": past_bytes}
            if place is None and rule.is_robust:
                common |= {"present": self.members.num_present, "refuse": self.rejections.note}
                common["choose"] = self.choices.note
                return BufferedStore(
                    *terms, rule, tell=lambda *event, **more: self.electing.tell(*event, **more),
                    **common,
                )  # fmt: skip
            if place is None:
                return AsynchronousStore(*terms, rule, **common)
            above = Above(
                str(self.members.terms.site),
                model.compressor(place.compression),
                model.compressor(place.downlink),
                self.members.terms.period or len(self.members.children),
                parse(place.rule).is_mean,
            )
            return PeriodicStore(*terms, rule, above=above, **common)
        sketched = rule.sketched
        shares = self.members.shares() if is_passed and rule.is_asynchronous else None
        if is_passed:  # what becomes of the sum or mean is the topmost server's
            own = self.members.terms.robust
            rule = parse(own if own is not None else "mean" if rule.is_mean else "sum")
        quorum = self.members.terms.quorum
        workers = [one.workers for _, one in sorted(self.members.children.items())]
        chunks = self.members.terms.shard.chunks(model)
        partial = Partial(workers, chunks, carries=quorum.late == NEXT) if quorum else None
        sizes = [chunk.size for chunk in model.chunks]
        if rule.votes is not None:
            return self.electing.make_store(
                rule,
                *terms,
                sizes=sizes,
                gives_up=quorum is not None,
                workers=child.workers,
                site=self.members.terms.site,
                first_round=first_round,
                past=self.recorder.make_past(past_bytes),
                **common,
            )
        common |= {
            "first_round": first_round,
            "past": self.recorder.make_past(past_bytes),
            "refuse": self.rejections.note,
            "choose": self.choices.note,
        }
        site = self.members.terms.site
        if sketched is not None and is_passed:
            return SketchingStore(*terms, sketched=sketched, sizes=sizes, site=site, **common)
        if sketched is not None and self.electing.secret is not None:
            return WeighingStore(
                *terms,
                sketched=sketched,
                leaves=self.members.paths_by_child,
                secret=self.electing.secret,
                updates=AddingUpdates(sizes, rule),
                **common,
            )
        parties = self.members.terms.parties
        most = len(parties) if quorum is None else quorum.least
        whole = rule_of(rule, parties, child.seed, most)
        make: Callable[..., Store] = Store
        if isinstance(whole, Distances) and not self.members.terms.shard.is_whole:
            make = functools.partial(JointStore, joint=whole)
        if rule.is_robust and whole is None:
            common["note_absurd"] = self.rejections.note_absurd
        updates = Updates(sizes, rule, shares, whole, most)
        return make(*terms, updates=updates, site=site, partial=partial, **common)

    def _joined(self) -> dict[str, Any]:
        names = ["process", "workers", "compression", "downlink", "seed", "rule", "num_returns"]
        names += ["leaves", "above", "groups", "paths", "guards"]
        children, place = self.members.children, self.members.place
        return {
            "children": [
                {name: getattr(children[one], name) for name in names} for one in sorted(children)
            ],
            "session": self.members.session,
            "secret": self.electing.secret,
            "place": place and dataclasses.asdict(place),
        }


def _partial_entries(partial: Partial | None) -> Iterator[Entry]:
    """What is kept of rounds that children have missed, and of late updates."""
    if partial is None:
        return
    missed, late = partial.kept()
    weights = [[*key, one.weight] for key, one in late if not one.packets]
    yield Kind.MISSED, {"spans": missed, "weights": weights}, b""
    for (child, number), one in late:
        for chunk, packet in sorted(one.packets.items()):
            fields = {"round": number, "child": child, "chunk": chunk, "weight": one.weight}
            yield Kind.LATE, fields, packet.data


def _restore_partial(partial: Partial, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
    """Takes an entry of `_partial_entries`."""
    if kind == Kind.MISSED:
        for child, spans in fields["spans"]:
            partial.restore_missed(child, spans)
        for child, number, weight in fields.get("weights", []):
            partial.weigh(number, child, weight)
        return
    number, child = fields["round"], fields["child"]
    partial.restore_packet(number, child, fields["chunk"], np.frombuffer(data, np.uint8))
    partial.weigh(number, child, fields["weight"])
