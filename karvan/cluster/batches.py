"""A parameter server's work in training: lookups, and the gradients that follow them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from karvan.cluster.rounds import Rounds
from karvan.store.messages import floats, words
from karvan.store.owner import Answered, Owner, Summed
from karvan.store.protocol import Keys, Vectors
from karvan.store.wording import from_wire, rule_from_json, to_wire
from karvan.wire import Caller, Message, RefusedError

_WAIT = 240.0  # seconds that trainers wait for each other, less than for a server


class _Asked(NamedTuple):
    counts: list[int]
    keys: Keys


class Batches:
    """The batches of one run of a job's trainers.

    A trainer's lookup is kept until it says that it is done with it. In a synchronous run lookups and
    gradients of all trainers are done together, in their order; otherwise each as it comes.
    """

    def __init__(self, owner: Owner, hello: Mapping[str, Any]) -> None:
        self._owner = owner
        self._trainers = int(hello["trainers"])
        self._together = hello["mode"] == "sync" and self._trainers > 1
        self._by_key = hello.get("grad_reduce") == "key"
        self._rounds = Rounds(self._trainers, _WAIT)
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int, int], Answered] = {}  # by trainer, store and batch
        self.keys = 0  # looked up so far
        self.pulls = 0
        self.pushes = 0

    def end(self, reason: str) -> None:
        """No more; trainers that wait get the reason."""
        self._rounds.end(reason)
        with self._lock:
            self._kept.clear()

    def pull(self, call: Message, caller: Caller) -> Message:
        """Look up what a trainer asks for."""
        head, trainer = call.head, int(caller.hello["trainer"])
        self._forget(trainer, head)
        tables, counts = list(head["tables"]), [int(n) for n in head["counts"]]
        keys = _checked(call.arrays, 0, np.int64, words(sum(counts)))
        if len(counts) != len(tables) or min(counts, default=0) < 0:
            raise RefusedError(f"expected a number of keys for each of {len(tables)} tables, got {counts}.")
        training, step, now = bool(head["training"]), int(head["step"]), float(head["now"])

        def work(asked: list[_Asked]) -> Answered:
            return self._owner.lookup(
                tables,
                [one.counts for one in asked],
                [one.keys for one in asked],
                training=training,
                step=step,
                now=now,
            )

        mine = _Asked(counts, keys)
        together = self._together and training
        if together:
            name = ("pull", head["store"], head["batch"])
            answered = self._rounds.take_part(name, trainer, mine, work)
        else:
            answered = work([mine])
        if training:
            with self._lock:
                self._kept[trainer, int(head["store"]), int(head["batch"])] = answered
        self.keys += sum(counts)
        self.pulls += 1
        vectors = answered.vectors
        if together:
            sizes = floats(answered.asked, answered.dims)
            begin = sum(sizes[:trainer])
            vectors = vectors[begin : begin + sizes[trainer]]
        return Message({}, [to_wire(vectors, head["wire"])])

    def push(self, call: Message, caller: Caller) -> Message:
        """Apply a trainer's gradients."""
        head, trainer = call.head, int(caller.hello["trainer"])
        store = int(head["store"])
        rules = {table: rule_from_json(told) for table, told in head["rules"].items()}
        steps = {table: int(step) for table, step in head["steps"].items()}
        complete = bool(head["complete"])
        with self._lock:
            kept = [self._kept.get((trainer, store, int(batch))) for batch in head["batches"]]
        passes = [answered for answered in kept if answered is not None]
        if len(passes) != len(kept) or not passes:
            raise RefusedError(f"expected gradients of batches that were looked up, got {head['batches']}.")
        if unknown := [name for name in (*rules, *head["skipped"]) if name not in passes[0].tables]:
            raise RefusedError(f"expected rules for tables that were looked up, got '{unknown[0]}'.")
        gradients = []
        for number, answered in enumerate(passes):
            place = trainer if self._together else 0
            size = floats(answered.asked, answered.dims)[place]
            gradients.append(from_wire(_checked(call.arrays, number, None, size), head["wire"]))

        def work(of_trainers: list[list[Vectors]]) -> None:
            for table in head["skipped"]:
                self._owner.store.skip(table)
            summed: list[tuple[Answered, Summed]] = []
            for number, answered in enumerate(passes):
                listed = [each[number] for each in of_trainers]
                one = self._owner.reduce(answered, listed, complete=complete, by_key=self._by_key)
                summed.append((answered, one))
            self._owner.update(passes[0].tables, summed, rules, steps)

        if self._together:
            self._rounds.take_part(("push", store, *head["batches"], *rules), trainer, gradients, work)
        else:
            work([gradients])
        self.pushes += 1
        self._forget(trainer, head)
        return Message({})

    def _forget(self, trainer: int, head: Mapping[str, Any]) -> None:
        with self._lock:
            for batch in head["done"]:
                self._kept.pop((trainer, int(head["store"]), int(batch)), None)


def _checked(arrays: Any, number: int, dtype: Any, size: int) -> Any:
    if number >= len(arrays):
        raise RefusedError(f"expected array {number} of the call, got {len(arrays)} arrays.")
    array = arrays[number]
    if array.shape != (size,) or (dtype is not None and array.dtype != dtype):
        expected = "" if dtype is None else f"{np.dtype(dtype)} "
        raise RefusedError(f"expected {size} {expected}numbers, got {array.dtype} {array.shape}.")
    return array
