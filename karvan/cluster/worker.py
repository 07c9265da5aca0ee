"""The embedding worker: keeps the id features of batches, and embeds them for trainers.

A loader sends ids under a name (`put`) and the name, as a `Reference`, to a trainer. The trainer claims the
batch: the worker groups the ids by key, looks the keys up at the parameter servers in the trainer's name, and
answers with the outputs of all features. The gradients of these outputs come back by the same name; the
worker sums them by key, pushes the sums, and answers once all servers have applied them.

A worker holds nothing that cannot be had again. One that replaces a dead one knows neither engines nor ids:
it says so (`needs`), is told, and does what the dead one may have done already. That is no harm, because the
numbers of lookups and pushes are the trainer's, and servers do each once.

A parameter server that has restarted, and may take its rows as they were saved, is told to do so by whoever
meets it first; workers tell their trainers of it.

| variable | meaning | default |
|---|---|---|
| KARVAN_WORKER_EXPIRE | seconds after which a batch that nobody has claimed is dropped | 1000 |
| KARVAN_WORKER_BATCHES | batches that may wait to be claimed; loaders wait then | 1000 |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from karvan.cluster.embedding import Embedded, Embedding, Speaker
from karvan.cluster.generations import Generations, generations_of
from karvan.cluster.kept_ids import KeptIds
from karvan.cluster.packing import unpack
from karvan.cluster.role import Settings
from karvan.ragged import Ragged
from karvan.ranks.servers import Servers, find_servers
from karvan.store.wording import to_wire
from karvan.wire import Caller, Message, RefusedError, Service
from karvan.wire.kinds import Plain

_SERVER_WITHIN = 300.0  # seconds for a call of a parameter server


class EmbeddingWorker(Service):
    """Worker number `index`; expire and most: see `KeptIds`."""

    hello = Plain()

    def __init__(
        self,
        index: int = 0,
        *,
        expire: float = 1000.0,
        most: int = 1000,
        generations: Generations | None = None,
    ) -> None:
        self.name = f"embedding worker {index}"
        self._index = index
        self._ids = KeptIds(expire, most)
        self._lock = threading.Lock()
        self._generations = generations or Generations()
        self._generation = -1
        self._run = ""
        self._speakers: dict[int, Speaker] = {}  # by trainer
        self.claims = 0
        self.backwards = 0

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """See `Service.welcome`: loaders may say anything, a trainer says what a parameter server wants."""
        hello = caller.hello
        if "run" not in hello:
            return {"worker": self._index}
        try:
            given, run, trainer = hello["generation"], str(hello["run"]), int(hello["trainer"])
            place = int(hello["worker"])
        except (KeyError, ValueError, TypeError) as error:
            raise RefusedError("expected a trainer's hello, with its generation, run and number.") from error
        if place != self._index:
            raise RefusedError(f"expected to be asked for as worker {self._index}, got {place}.")
        generation = self._generations.check(given)
        with self._lock:
            if generation < self._generation:
                raise RefusedError(
                    f"expected generation {self._generation} or a newer one, got {generation}."
                )
            if run != self._run:
                self._leave()
                self._generation, self._run = generation, run
            if trainer not in self._speakers:
                self._speakers[trainer] = Speaker(_servers_for(hello), hello)
        return {"worker": self._index}

    def _leave(self) -> None:
        """Forget the trainers of a run that is over."""
        for speaker in self._speakers.values():  # which may take a while, and nobody need wait for it
            threading.Thread(target=speaker.close, name="karvan-leave", daemon=True).start()
        self._speakers = {}
        self._ids.forget_claimed()

    def answer(self, call: Message, caller: Caller) -> Message:  # type: ignore[misc]
        """See `Service.answer`."""
        method = call.head.get("method")
        try:
            match method:
                case "put":
                    return self._put(call)
                case "forget":
                    self._ids.forget(_names(call.head["references"]))
                    return Message({})
                case "describe":
                    return Message(self._describe())
                case "engine":
                    return self._engine(call, self._speaker(caller))
                case "claim":
                    return self._claim(call, self._speaker(caller))
                case "backward":
                    return self._backward(call, self._speaker(caller))
        except (KeyError, TypeError, IndexError) as error:
            raise RefusedError(
                f"expected a well-formed call of {method!r}, got one without {error}."
            ) from error
        return super().answer(call, caller)

    def _speaker(self, caller: Caller) -> Speaker:
        with self._lock:
            hello = caller.hello
            if "run" not in hello or hello["run"] != self._run:
                raise RefusedError("expected a trainer of the job's newest run, got somebody else.")
            return self._speakers[int(hello["trainer"])]

    def _put(self, call: Message) -> Message:
        name = call.head["reference"]
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise RefusedError(f"expected a reference of 1 to 200 characters, got {str(name)[:200]!r}.")
        ids = unpack(call)
        for feature, entry in ids.items():
            values = entry.values if isinstance(entry, Ragged) else entry
            if not isinstance(values, torch.Tensor) or values.dtype not in (torch.int64, torch.uint64):
                raise RefusedError(f"expected ids of 64 bits for '{feature}', got something else.")
            if isinstance(entry, Ragged):
                entry.validate()
        return Message({"kept": self._ids.put(name, ids)})

    def _engine(self, call: Message, speaker: Speaker) -> Message:
        head = call.head
        speaker.declare(head["tables"], int(head["declarations"]))
        speaker.engines[str(head["engine"])] = Embedding(speaker, head["features"], str(head["wire"]))
        return Message({})

    def _claim(self, call: Message, speaker: Speaker) -> Message:
        head = call.head
        self._let_go(head, speaker)
        engine = _engine_of(head, speaker)
        if engine is None:
            return _needs_engine()
        name = str(head["reference"])
        ids = self._ids.claim(name)
        if ids is None:
            return self._needs_ids(name)
        embedded = engine.begin(ids, int(head["store"]), int(head["batch"]), head)
        outs = embedded.finish()
        if bool(head["training"]):
            speaker.keep(int(head["store"]), int(head["batch"]), embedded)
        self.claims += 1
        laid, offsets = [], [np.empty(0, np.int64)]
        for one in embedded.inputs:
            out = one.laid()
            laid.append([out.rows, out.ids, out.length, out.offsets is not None])
            if out.offsets is not None:
                offsets.append(out.offsets.numpy())
        vectors = torch.cat([out.reshape(-1) for out in outs])
        told = {"laid": laid, "begun_anew": speaker.take_begun_anew()}
        return Message(told, [to_wire(vectors, engine.wire), np.concatenate(offsets)])

    def _backward(self, call: Message, speaker: Speaker) -> Message:
        head = call.head
        engine = _engine_of(head, speaker)
        if engine is None:
            return _needs_engine()
        store = int(head["store"])
        batches = [int(head["batches"][place]) for place in head["mine"]]
        if not len(batches) == len(head["passes"]) == len(call.arrays):
            raise RefusedError(
                f"expected gradients of {len(batches)} passes, got {len(call.arrays)} arrays "
                f"and {len(head['passes'])} descriptions."
            )
        passes: list[Embedded] = []
        for batch, told in zip(batches, head["passes"], strict=True):
            embedded = speaker.kept(store, batch)
            if embedded is None:
                name = str(told["reference"])
                ids = self._ids.claim(name)
                if ids is None:
                    return self._needs_ids(name)
                embedded = engine.group(ids)
                speaker.keep(store, batch, embedded)
            passes.append(embedded)
        sums = [
            embedded.sum(array, told["given"], bool(head["complete"]))
            for embedded, told, array in zip(passes, head["passes"], call.arrays, strict=True)
        ]
        engine.push(head, sums)
        self._let_go(head, speaker)
        self.backwards += 1
        return Message({"begun_anew": speaker.take_begun_anew()})

    def _let_go(self, head: Mapping[str, Any], speaker: Speaker) -> None:
        speaker.forget(int(head["store"]), [int(batch) for batch in head["done"]])
        self._ids.forget(_names(head["gone"]))

    def _needs_ids(self, name: str) -> Message:
        text = f"expected the ids of reference {name!r}, got a claim without: {self._ids.why_missing(name)}."
        return Message({"needs": "ids", "reference": name, "text": text})

    def _describe(self) -> dict[str, Any]:
        """What it holds and has done, for people and tests."""
        return {
            "waiting": self._ids.waiting,
            "kept": len(self._ids),
            "received": self._ids.received,
            "expired": self._ids.expired,
            "claims": self.claims,
            "backwards": self.backwards,
            "plans": sum(len(speaker) for speaker in self._speakers.values()),
        }

    def close(self) -> None:
        """See `Service.close`."""
        with self._lock:
            self._leave()


def _servers_for(hello: Mapping[str, Any]) -> Servers:
    """The parameter servers, as a trainer would talk to them."""
    told = {name: value for name, value in hello.items() if name not in ("worker", "line")}
    try:
        servers = find_servers(None, told, _SERVER_WITHIN, bool(hello.get("reload")))
    except (RuntimeError, ValueError) as error:
        raise RefusedError(f"expected parameter servers in the environment, got none: {error}") from error
    if len(servers) != int(hello["servers"]):
        raise RefusedError(
            f"expected a trainer with {len(servers)} parameter servers, got one with {hello['servers']}."
        )
    return servers


def _engine_of(head: Mapping[str, Any], speaker: Speaker) -> Embedding | None:
    """The engine, unless the trainer has more to tell of it."""
    known = speaker.declarations >= int(head["declarations"])
    return speaker.engines.get(head["engine"]) if known else None


def _needs_engine() -> Message:
    return Message({"needs": "engine", "text": "expected to know the trainer's engine."})


def _names(told: Any) -> list[str]:
    if not isinstance(told, list) or not all(isinstance(name, str) for name in told):
        raise RefusedError("expected a list of references' names.")
    return told


def make(settings: Settings) -> Service:
    """The worker of a process; see `role.py`."""
    return EmbeddingWorker(
        settings.index,
        expire=float(os.environ.get("KARVAN_WORKER_EXPIRE", "1000")),
        most=int(os.environ.get("KARVAN_WORKER_BATCHES", "1000")),
        generations=generations_of(settings),
    )
