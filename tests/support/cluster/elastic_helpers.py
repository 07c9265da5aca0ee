"""Members of an elastic run that call parameter servers, and a slow reference of the servers' tables."""

import contextlib
import itertools
import threading

import numpy as np

import karvan as kv
from karvan.protocol.parameter_server import COMMIT, PULL, PUSH, SERVER_CALLS
from karvan.store.messages import hashes_of, owners_of, rule_to_json, spec_to_json, words
from karvan.wire import Client

DIM = 2
_runs = itertools.count(1)


def spec_of(name, **options):
    """A table of DIM floats with uniform initial vectors."""
    return kv.Table(DIM, name, **options).spec(name, 7, 4)


def rule_of(kind="momentum", lr=0.5, beta=0.5):
    """Factors are powers of two, so that there is one way to round."""
    rule = kv.store.Rule(kind)
    rule.lr = lr
    if kind == "momentum":
        rule.beta1 = beta
    elif kind == "adam":
        rule.beta1, rule.beta2, rule.eps = 0.9, 0.99, 1e-8
    elif kind == "adagrad":
        rule.beta1, rule.eps = 1.0, 1e-8
    return rule_to_json(rule)


class Run:
    """A run with empty tables on some servers, which are at these addresses."""

    def __init__(self, addresses, specs, *, elastic=True, trainers=0, state=DIM, kind="momentum", **hello):
        self.addresses = addresses
        self.specs = {spec.name: spec for spec in specs}
        self.kind = kind  # of optimizer
        hello = {"mode": "sync", "staleness": 1, "grad_reduce": "mean", **hello}
        self.hello = {**hello, "generation": 0, "run": f"run {next(_runs)}", "trainers": trainers}
        if elastic:
            self.hello["elastic"] = True
        self._stack = contextlib.ExitStack()
        first = self.member(0)
        for spec in specs:
            first.all("add_table", {"spec": spec_to_json(spec)})
            first.all("clear", {"table": spec.name})
            first.all("set_state", {"table": spec.name, "initial": [0.0] * state, "fresh": True})

    def member(self, number):
        """One more trainer, or the same one once more."""
        return self._stack.enter_context(contextlib.closing(Member(self, number)))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()


class Member:
    """A trainer of the run, with a client of each server."""

    def __init__(self, run, number):
        self.run = run
        self.number = number
        count = len(run.addresses)
        self.clients = [
            Client(
                f"server {index}",
                address,
                hello={**run.hello, "trainer": number, "server": index, "servers": count},
                deadline=30.0,
            )
            for index, address in enumerate(run.addresses)
        ]

    def all(self, method, head):
        """The answers of all servers."""
        return [client.call(SERVER_CALLS[method], head) for client in self.clients]

    def pull(self, batch, uses, *, step=1, store=1, done=(), training=True, now=0.0, **more):
        """Look up {table: {key: uses}}; returns {table: {key: vector}}."""
        found = {table: {} for table in uses}
        for index, client in enumerate(self.clients):
            mine = {table: self._mine(index, each) for table, each in uses.items()}
            counts = [len(keys) for keys in mine.values()]
            size = sum(counts)
            message = np.zeros(words(size), np.int64)
            message[:size] = [key for keys in mine.values() for key in keys]
            message[size:].view(np.uint32)[:size] = [uses[t][key] for t, keys in mine.items() for key in keys]
            head = {"store": store, "batch": batch, "tables": list(uses), "counts": counts}
            head |= {"training": training, "step": step, "now": now, "wire": "float32", "done": list(done)}
            vectors = client.call(PULL, {**head, **more}, [message]).arrays[0].reshape(-1, DIM)
            for (table, key), vector in zip(
                ((table, key) for table, keys in mine.items() for key in keys), vectors, strict=True
            ):
                found[table][key] = vector
        return found

    def _mine(self, index, keys):
        listed = np.array(sorted(keys), np.int64)
        return listed[owners_of(hashes_of(listed), len(self.clients)) == index].tolist()

    def push(self, sequence, batches, gradients, *, step=1, store=1, skipped=(), only=None, **more):
        """Stage gradients, one {table: {key: gradient}} for each batch; only: at these servers.

        tables: those that are updated, otherwise all. A run that is not elastic applies them.
        """
        tables = list(gradients[0])
        updated = more.pop("tables", tables)
        rules = {table: rule_of(self.run.kind) for table in updated if table not in skipped}
        head = {"store": store, "sequence": sequence, "batches": list(batches), "rules": rules}
        head |= {"steps": dict.fromkeys(rules, step), "skipped": list(skipped)}
        head |= {"complete": True, "wire": "float32", "done": [], **more}
        if self.run.hello.get("elastic"):
            head["step"] = step
        for index, client in enumerate(self.clients):
            if only is not None and index not in only:
                continue
            arrays = [
                np.array([each[t][key] for t in tables for key in self._mine(index, each[t])], np.float32)
                for each in gradients
            ]
            client.call(PUSH, head, [array.reshape(-1) for array in arrays])

    def commit(self, step, parts, scale=1.0, ack=None, only=None):
        """Commit at all servers, or some."""
        head = {"step": step, "parts": [list(part) for part in parts], "scale": scale, "ack": ack}
        for index, client in enumerate(self.clients):
            if only is None or index in only:
                client.call(COMMIT, head)
        return head

    def progress(self):
        """Of all servers."""
        return [vars(answer.head) for answer in self.all("progress", {})]

    def rows(self, table):
        """{key: (vector, state, count, last step)} of all servers, as plain values."""
        found = {}
        for answer in self.all("snapshot", {"table": table, "part": 0, "parts": 1}):
            keys, *columns = answer.arrays
            for key, *row in zip(keys.tolist(), *(column.tolist() for column in columns), strict=True):
                found[key] = tuple(row)
        return found

    def close(self):
        for client in self.clients:
            client.close()


class SlowTable:
    """A table as dicts: momentum, admission by count, eviction of the least recently used."""

    def __init__(self, spec):
        self.spec = spec
        self.rows = {}  # key: [vector, state, count, last step]
        self.seen = {}  # uses of keys without a row

    def copy(self):
        made = SlowTable(self.spec)
        made.rows = {key: [row[0].copy(), row[1].copy(), *row[2:]] for key, row in self.rows.items()}
        made.seen = dict(self.seen)
        return made

    def read(self, keys):
        """What a lookup of an elastic run in mode sync returns."""
        return {key: self.rows[key][0] if key in self.rows else self._unborn(key) for key in keys}

    def _unborn(self, key):
        return np.zeros(DIM, np.float32) if self.spec.admit[0] == "min_count" else self._initial(key)

    def _initial(self, key):
        return self.spec.initial_vectors(np.array([key], np.int64))[0]

    def use(self, uses, step):
        """A lookup of all parts together: {key: uses}."""
        for key, times in uses.items():
            if key in self.rows:
                self.rows[key][2] += times
                self.rows[key][3] = step
            elif self._admits(key, times):
                self.rows[key] = [self._initial(key), np.zeros(DIM, np.float32), times, step]
        kind, capacity, _ = self.spec.evict
        if kind == "lru" and len(self.rows) > capacity:
            hashes = dict(
                zip(self.rows, hashes_of(np.array(list(self.rows), np.int64)).tolist(), strict=True)
            )
            order = sorted(self.rows, key=lambda key: (self.rows[key][3], self.rows[key][2], hashes[key]))
            for key in order[: len(order) - int(capacity)]:
                del self.rows[key]

    def _admits(self, key, times):
        if self.spec.admit[0] != "min_count":
            return True
        self.seen[key] = min(255, self.seen.get(key, 0) + times)
        return self.seen[key] >= self.spec.admit[1]

    def apply(self, gradients, scale, by_key=False):
        """One update with gradients of parts, {key: gradient} each, added up in their order."""
        sums, having = {}, {}
        for part in gradients:
            for key, gradient in part.items():
                one = np.asarray(gradient, np.float32) * np.float32(scale)
                sums[key] = sums[key] + one if key in sums else np.zeros(DIM, np.float32) + one
                having[key] = having.get(key, 0) + 1
        for key, total in sums.items():
            if key in self.rows:
                row = self.rows[key]
                total = total / np.float32(having[key]) if by_key else total
                row[1] = np.float32(0.5) * row[1] + total
                row[0] = row[0] - np.float32(0.5) * row[1]

    def plain(self):
        """As `Member.rows` returns them."""
        return {key: (row[0].tolist(), row[1].tolist(), row[2], row[3]) for key, row in self.rows.items()}


def at_once(*works):
    """Run functions on threads of their own; returns what each returned, or raises the first error."""
    results, errors = [None] * len(works), []

    def run(number, work):
        try:
            results[number] = work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results
