"""Jobs of several processes that a benchmark runs in turn: started once, told when to go, and timed by all.

A worker is this file with a kind and a JSON of options: it sets itself up, then waits for lines on its
standard input and answers each with a line of JSON: seconds and samples of its burst, and what it counted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Zipf, scramble

DIM, LR = 16, 0.02


class JobOfRanks:
    """Processes that wait for `burst`."""

    def __init__(self, kind: str, ranks: int, threads: int, *, wait: bool = True, **options: Any) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            }
            command = [sys.executable, "-W", "ignore", __file__, kind, json.dumps(options)]
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until all are set up."""
        self._answers()

    def burst(self) -> dict[str, float]:
        """Let all go; seconds are those of the slowest, everything else is summed over ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = self._answers()
        total = {name: sum(answer[name] for answer in answers) for name in answers[0]}
        return total | {"seconds": max(answer["seconds"] for answer in answers)}

    def end(self) -> None:
        """Let the processes go."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _answers(self) -> list[dict[str, float]]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("{"):  # what libraries say
                line = process.stdout.readline()
            if not line:
                raise SystemExit(f"A worker has ended with code {process.wait()}; its errors are above.")
            found.append(json.loads(line))
        return found


def sparse_batches(features: int, rows: int, batch: int, rank: int, count: int = 8) -> list[np.ndarray]:
    """Batches of mapped ids, (features, batch) each, by Zipf's law."""
    zipf = Zipf(rows, seed=rank)
    return [np.stack([zipf.sample(batch) for _ in range(features)]) for _ in range(count)]


def karvan_sparse(features: int, rows: int, batch: int, steps: int) -> Callable[[], dict[str, float]]:
    """Lookup with insert, pooling, backward and Adagrad on sharded tables, from 64-bit keys."""
    import karvan as kv
    from karvan import distributed

    connection = distributed.connect("sharded")
    kv.set_num_threads(torch.get_num_threads())
    names = [f"f{i}" for i in range(features)]
    engine = kv.EmbeddingEngine({name: kv.Table(DIM) for name in names})
    optimizer = kv.optim.Adagrad(engine, lr=LR)
    for start in range(0, rows, 1 << 14):
        ids = np.arange(start, min(start + (1 << 14), rows))
        engine({name: torch.from_numpy(scramble(ids, i)) for i, name in enumerate(names)})
    made = sparse_batches(features, rows, batch // connection.world_size, connection.rank)
    batches = cycle(
        [{name: torch.from_numpy(scramble(each[i], i)) for i, name in enumerate(names)} for each in made]
    )
    gradients = [torch.randn(batch // connection.world_size, DIM) for _ in names]

    def run() -> dict[str, float]:
        for _ in range(steps):
            vectors = engine(next(batches))
            torch.autograd.backward([vectors[name] for name in names], gradients)
            optimizer.step()
        return {"samples": steps * batch / connection.world_size}

    return run


def torchrec_sparse(features: int, rows: int, batch: int, steps: int, sharding: str) -> Callable[[], Any]:
    """The same by TorchRec over gloo, from ids that were mapped to rows."""
    import torch.distributed as dist
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    names = [f"f{i}" for i in range(features)]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[names[i]]
        )
        for i in range(features)
    ]
    module = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": LR})
    how = {
        f"t{i}": row_wise() if sharding == "row" else table_wise(rank=i % world, compute_kernel="fused")
        for i in range(features)
    }
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        module, how, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=[sharder],
    )
    lengths = torch.ones(features * batch // world, dtype=torch.int32)
    batches = cycle(
        [
            torchrec.KeyedJaggedTensor(
                keys=names, values=torch.from_numpy(each.reshape(-1).copy()), lengths=lengths
            )
            for each in sparse_batches(features, rows, batch // world, rank)
        ]
    )
    gradient = torch.randn(batch // world, features * DIM)

    def run() -> dict[str, float]:
        for _ in range(steps):
            model(next(batches)).values().backward(gradient)
        return {"samples": steps * batch / world}

    return run


def remote_dlrm(
    path: str, rows: int, batch: int, epochs: int, servers: list[str], staleness: int
) -> Callable[[], dict[str, float]]:
    """The training job of `train.py` with its rows on parameter servers."""
    import train

    import karvan as kv
    from karvan import distributed

    connection = distributed.connect("remote", servers=servers, staleness=staleness)
    torch.manual_seed(0)
    model = kv.models.DLRM(train.NUMBERS, train.IDS, DIM)
    trainer = train.karvan_trainer("fp32", model)
    train.fill(model, rows)
    store = model.embeddings.store
    at_servers = store.at_servers

    def run() -> dict[str, float]:
        keys, moved, cpu = at_servers.keys_asked, sum(connection.servers.bytes()), sum(os.times()[:2])
        busy = [each.head["cpu_seconds"] for each in connection.servers.call("describe")]
        for listed in at_servers.seconds.values():
            listed.clear()
        result = trainer.fit(kv.data.read(path, batch, epochs=epochs))
        after = [each.head["cpu_seconds"] for each in connection.servers.call("describe")]
        made: dict[str, float] = {
            "samples": result.samples,
            "steps": result.step,
            "keys": at_servers.keys_asked - keys,
            "bytes": sum(connection.servers.bytes()) - moved,
            "trainer_cpu": sum(os.times()[:2]) - cpu,
            "servers_cpu": sum(after) - sum(busy),
            "staleness": store.window.most,
        }
        for name, listed in at_servers.seconds.items():
            for share in (50, 99):
                made[f"{name}_p{share}"] = float(np.percentile(list(listed), share))
        return made

    return run


def pulls(servers: list[str], rows: int, keys: int, count: int) -> Callable[[], dict[str, float]]:
    """Lookups of distinct keys of one table, some of them under way at once: what a server can serve."""
    import karvan as kv
    from karvan import distributed

    connection = distributed.connect("remote", servers=servers, staleness=4)
    engine = kv.EmbeddingEngine({"table": kv.Table(DIM)}).eval()
    for start in range(0, rows, 1 << 17):
        ids = scramble(np.arange(start, min(start + (1 << 17), rows)))
        engine.train()({"table": torch.from_numpy(ids)})
    engine.eval()
    random = np.random.default_rng(0)
    batches = [
        {"table": torch.from_numpy(scramble(random.choice(rows, keys, replace=False)))} for _ in range(8)
    ]

    def run() -> dict[str, float]:
        busy = [each.head["cpu_seconds"] for each in connection.servers.call("describe")]
        with torch.no_grad():
            engine.prepare(batches[0], training=False)
            for number in range(count):
                engine.prepare(batches[(number + 1) % len(batches)], training=False)
                engine(batches[number % len(batches)])
        after = [each.head["cpu_seconds"] for each in connection.servers.call("describe")]
        engine.forget_prepared()
        return {"samples": keys * count, "servers_cpu": sum(after) - sum(busy)}

    return run


def dlrm(path: str, rows: int, batch: int, epochs: int, wire: str) -> Callable[[], dict[str, float]]:
    """A whole training job, as in `train.py`: on one process, or on several with sharded tables."""
    import train

    import karvan as kv
    from karvan import distributed

    world = int(os.environ["WORLD_SIZE"])
    connection = distributed.connect("sharded" if world > 1 else "memory", wire=wire)
    kv.set_num_threads(torch.get_num_threads())
    torch.manual_seed(0)
    model = kv.models.DLRM(train.NUMBERS, train.IDS, DIM)
    trainer = train.karvan_trainer("fp32", model)
    train.fill(model, rows)

    def run() -> dict[str, float]:
        before = {
            name: (channel.operations, channel.bytes_sent) for name, channel in connection.channels.items()
        }
        store = model.embeddings.store
        crossing, sent = getattr(store, "crossing_keys", 0), getattr(store, "bytes_sent", 0)
        result = trainer.fit(kv.data.read(path, batch // world, epochs=epochs))
        made: dict[str, float] = {"samples": result.samples / world, "steps": result.step / world}
        for name, channel in connection.channels.items():
            made[f"{name}_collectives"] = (channel.operations - before[name][0]) / world
            made[f"{name}_bytes"] = channel.bytes_sent - before[name][1]
        made["crossing_keys"] = getattr(store, "crossing_keys", 0) - crossing
        made["bytes"] = getattr(store, "bytes_sent", 0) - sent
        return made

    return run


def messages(size: int, steps: int) -> Callable[[], dict[str, float]]:
    """Exchanges of so many bytes with every rank over the network."""
    from karvan import distributed

    channel = distributed.connect("sharded", transport="network").main
    send = torch.zeros(size * channel.world_size, dtype=torch.uint8)

    def run() -> dict[str, float]:
        for _ in range(steps):
            channel.exchange(send, [size] * channel.world_size, [size] * channel.world_size)
        return {"steps": steps}

    return run


def work(path: str, rows: int, batch: int, epochs: int) -> Callable[[], dict[str, float]]:
    """The training job of one rank with nobody to talk to: the seconds of each step."""
    import train

    import karvan as kv

    times: list[float] = []

    class Stopwatch(kv.callbacks.Callback):
        def on_step_end(self, trainer: kv.callbacks.TrainerView, logs: object) -> None:
            times.append(time.perf_counter())

    model = kv.models.DLRM(train.NUMBERS, train.IDS, DIM)
    trainer = train.karvan_trainer("fp32", model, [Stopwatch()])
    train.fill(model, rows)

    def run() -> dict[str, float]:
        times.clear()
        trainer.fit(kv.data.read(path, batch, epochs=epochs))
        made = {f"step_{i:04d}": b - a for i, (a, b) in enumerate(pairwise(times))}
        first = next(iter(kv.data.read(path, batch)))
        keys = sum(len(torch.unique(first[name])) for name in train.IDS)
        return made | {"keys": keys, "dense_bytes": 4 * sum(p.numel() for p in model.parameters())}

    return run


KINDS = {
    "karvan": karvan_sparse,
    "torchrec": torchrec_sparse,
    "dlrm": dlrm,
    "remote_dlrm": remote_dlrm,
    "pulls": pulls,
    "messages": messages,
    "work": work,
}


def main() -> None:
    """Set up, then answer every line with a burst."""
    kind, options = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = KINDS[kind](**json.loads(options))
    print("{}", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        counted = run()
        print(json.dumps(counted | {"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
