"""Pinned digests of short trainings: losses, rows, the files of checkpoints, and messages on the wire.

tests/digests.json has what each case left behind when it was written. A change that must not change a number
or a byte leaves it as it is. After one that does so on purpose, write it anew, and say why in the commit:

    .venv/bin/python -m pytest tests/test_digests.py --write-digests
"""

import json
from pathlib import Path

import exact_training
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ranks_helpers
import worker_helpers
from cluster_helpers import serving
from elastic_jobs import elastic_job
from exact_training import OPTIMIZERS, batches, columns, fit, loop
from recorded_wire import Recorder
from role_loaders import Loaders

import karvan as kv
from karvan import distributed

STATE = ("rows", "weights")
PINNED = Path(__file__).parent / "digests.json"


def memory(folder, monkeypatch, train=fit, **options):
    kv.connect("memory")
    return train(folder / "run", **options)


def cuda(folder, monkeypatch, **options):
    """Rows in the store of a GPU, whose kernels Triton's interpreter runs on the CPU."""
    store = pytest.importorskip("karvan.store.cuda.store").CudaStore("cpu")
    return memory(folder, monkeypatch, store=store, **options)


def features(folder, monkeypatch):
    """The columns as text and numbers, transformed to what they are in the other cases, and others."""
    given = columns()
    given["word"] = [f"Word {word}|" for word in given["word"]]
    given["price"] = [None if n % 5 == 0 else n / 8 for n in range(len(given["word"]))]
    engine = kv.FeatureEngine(
        [
            kv.Feature("word").lower().strip().hash("farm", bucket=1000),
            kv.Feature("user").select("price").fill_missing(3.0).clip(1.0, 20.0).bucketize([2.0, 4.0, 9.0]),
            kv.Feature("item").truncate(2).mod(17).prefix(1, 8),
            kv.Feature("page").cross("page", "item"),
        ]
    )
    data = kv.data.read(given, 16, shuffle=32, seed=3, transform=engine)
    return memory(folder, monkeypatch, data=data)


def sharded(folder, monkeypatch, ranks, way="fit", **options):
    return ranks_helpers.run(ranks, "exact_training:on_rank", run=str(folder / "run"), way=way, **options)


def remote(folder, monkeypatch, servers, train=fit, connect=None, **options):
    with serving(servers, folder) as addresses:
        distributed.connect("remote", servers=addresses, **(connect or {}))
        return train(folder / "run", **options)


def worker(folder, monkeypatch):
    cluster = worker_helpers.Cluster(2, 1, KARVAN_CHECKPOINTS=str(folder))
    try:
        cluster.wait()
        loader = worker_helpers.Loader(cluster, 1, "digests").serve(cluster.connect(monkeypatch))
        data = [loader.send(batch, ids=("user", "item", "page", "word")) for batch in 2 * batches()]
        made = fit(folder / "run", data=data, epochs=1, half=None)
        distributed.disconnect()
        loader.close()
        return made
    finally:
        cluster.close()


def loader(folder, monkeypatch):
    with Loaders(1, command=[exact_training.__file__]) as loaders:
        return memory(folder, monkeypatch, data=loaders.stream())


def elastic(folder, monkeypatch, trainers=1, keep=None, **settings):
    """keep: what does not depend on which trainer has which batch, and how far another has come."""
    with elastic_job(folder, servers=2, program="exact_training", **settings) as job:
        for path in job.data.glob("*.parquet"):
            path.unlink()
        pq.write_table(pa.table(columns()), job.data / "0.parquet")
        for _ in range(trainers):
            job.start()
        digests = job.results(1)[0]
        return digests if keep is None else {name: digests[name] for name in keep}


def wire(folder, monkeypatch, **options):
    recorder = Recorder(monkeypatch)
    made = remote(folder, monkeypatch, **options)
    return {"messages": recorder.digests(), "losses": made["losses"]}


CASES = {
    **{f"memory, {name}": (memory, {"optimizer": name}) for name in OPTIMIZERS},
    "memory, a loop of a TrainContext": (memory, {"train": loop}),
    "memory, a FeatureEngine": (features, {}),
    **{f"cuda, {name}": (cuda, {"optimizer": name}) for name in OPTIMIZERS},
    "sharded, 2 ranks": (sharded, {"ranks": 2}),
    "sharded, 3 ranks, Adam": (sharded, {"ranks": 3, "optimizer": "adam"}),
    "sharded, 2 ranks, a loop of a TrainContext": (sharded, {"ranks": 2, "way": "loop"}),
    "remote sync, 1 server": (remote, {"servers": 1}),
    "remote sync, 2 servers, FTRL": (remote, {"servers": 2, "optimizer": "ftrl"}),
    "remote sync, 2 servers, a loop of a TrainContext": (remote, {"servers": 2, "train": loop}),
    "remote hybrid, 1 server": (remote, {"servers": 1, "connect": {"mode": "hybrid"}, "prefetch": 0}),
    "remote async, 2 servers": (remote, {"servers": 2, "connect": {"mode": "async"}, "prefetch": 0}),
    "remote sync, 2 servers, a worker": (worker, {}),
    "memory, a loader": (loader, {}),
    "elastic sync, 2 servers": (elastic, {"KARVAN_MODE": "sync", "KARVAN_GLOBAL_BATCHES": 2}),
    "elastic hybrid, 2 servers": (elastic, {"KARVAN_MODE": "hybrid", "KARVAN_STALENESS": 1}),
    "elastic sync, 2 servers, 2 trainers": (
        elastic,
        {"trainers": 2, "keep": STATE, "KARVAN_MODE": "sync", "KARVAN_GLOBAL_BATCHES": 2},
    ),
    "messages, remote sync": (wire, {"servers": 2}),
    "messages, remote async": (wire, {"servers": 1, "connect": {"mode": "async"}, "prefetch": 0}),
}


# The interpreter of kernels is slow; tests/store compares all optimizers.
SLOW = {"cuda, adam", "cuda, ftrl"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_a_training_leaves_the_pinned_bits(case, tmp_path, monkeypatch, request):
    run, options = CASES[case]
    try:
        made = json.loads(json.dumps(run(tmp_path, monkeypatch, **options)))
    finally:
        kv.connect("memory")
    pinned = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    if request.config.getoption("--write-digests"):
        PINNED.write_text(json.dumps({**pinned, case: made}, indent=1, sort_keys=True) + "\n")
    else:
        assert made == pinned[case]
