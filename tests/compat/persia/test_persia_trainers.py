"""Several trainers of a PERSIA job: features that the program's net gets, dumps that one of them asks for."""

import json
import os
import sys
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from persia_job import PersiaJob
from ranks_helpers import environments

from karvan.checkpoint import find

SLOTS = "slots_config: {user: {dim: 4}, item: {dim: 4}}\n"
LOADER = """
import numpy as np
from persia.ctx import DataCtx
from persia.embedding.data import *

with DataCtx() as ctx:
    for number in range(13):  # one of two trainers has no batch at last
        generator = np.random.default_rng(number)
        users = generator.integers(0, 9, 8).astype(np.uint64)
        items = [generator.integers(0, 9, length).astype(np.uint64) for length in generator.integers(0, 4, 8)]
        ctx.send_data(
            PersiaBatch(
                [IDTypeFeature("item", items), IDTypeFeatureWithSingleID("user", users)],
                [NonIDTypeFeature(generator.random((8, 1), np.float32))],
                [Label((users % 2).astype(np.float32)[:, None])],
            )
        )
"""
TRAINER = """
import json, sys, torch
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.optim import Adagrad
from persia.env import get_rank
from persia.utils import setup_seed

style, folder = sys.argv[1], sys.argv[2]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 1))
    def forward(self, non_ids, embeddings):
        return self.layers(torch.cat([*non_ids, *embeddings], 1)).sigmoid()

class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())

setup_seed(get_rank())  # rank 0 decides how parameters start
net = Net()
losses, sizes = [], []
with TrainCtx(
    embedding_optimizer=Adagrad(lr=0.5),
    dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
    mixed_precision=False,
    **({} if style == "bare" else {"model": net}),
) as ctx:
    for number, data in enumerate(DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)):
        if style == "forward":
            output, labels = ctx.forward(data)
        else:
            non_ids, embeddings, labels = ctx.prepare_features(data)
            output = net(non_ids, embeddings)
        loss = torch.nn.functional.binary_cross_entropy(output, labels[0])
        if style == "nan" and number == 2 and get_rank() == 1:
            loss = loss + (embeddings[1] * torch.nan).sum()
        if labels[0].shape[0]:
            losses.append(float(ctx.backward(loss)))
        else:
            ctx.backward(loss)
        if style == "dump" and number == 2 and get_rank() == 0:
            ctx.dump_checkpoint(folder + "/middle")
    sizes.append(ctx.get_embedding_size())
    if style == "nan":
        for name in ("user", "item"):
            table = ctx.open()[1].embeddings.table(name)
            values = table.vectors(table.keys())
            sizes.append([bool(values.isfinite().all()), table.stats()["skipped_updates"]])
    if style == "conflict":
        ctx.dump_embedding(f"{folder}/rank{get_rank()}")
    if style == "dump":
        if get_rank() == 1:
            ctx.dump_embedding(folder + "/end", blocking=True)
        with eval_ctx(model=net) as evaluation:  # where rank 0 finds that it is asked for the dump
            for data in DataLoader(Nothing(buffer_size=1)):
                raise AssertionError("there is no batch")
        ctx.clear_embeddings()
        sizes.append(ctx.get_embedding_size())
        if get_rank() == 0:
            ctx.load_embedding(folder + "/end")
            sizes.append(ctx.get_embedding_size())
            ctx.dump_checkpoint(folder + "/loaded")  # the others are at the end of the context
parameters = [value for each in net.parameters() for value in each.flatten().tolist()]
print("result", json.dumps([get_rank(), losses, sizes, parameters]), flush=True)
"""


def run(folder, style):
    """Losses, sizes of servers and parameters of both trainers."""
    job = PersiaJob(folder, {"embedding.yml": SLOTS, "loader.py": LOADER, "trainer.py": TRAINER})
    places = [["--port", 0, "--replica-index", index, "--replica-size", 2] for index in range(2)]
    roles = {
        "nn-worker": [
            [folder / "trainer.py", style, folder, "--nnodes", 2, "--node-rank", rank] for rank in range(2)
        ],
        "data-loader": [[folder / "loader.py"]],
        "embedding-worker": [["--port", 0]],
        "embedding-parameter-server": places,
    }
    job.environment["KARVAN_CHECKPOINTS"] = str(folder)
    try:
        output = job.run(roles, list(roles))
    finally:
        job.close()
    lines = [line.removeprefix("result ") for line in output.splitlines() if line.startswith("result ")]
    return sorted(map(json.loads, lines))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What `ctx.forward` gives."""
    results = run(tmp_path_factory.mktemp("forward"), "forward")
    (_, mine, sizes, parameters), (_, others, *same) = results
    assert (len(mine), len(others)) == (7, 6)
    assert same == [sizes, parameters]
    assert sum(sizes[0]) == 18
    return results


@pytest.mark.slow
@pytest.mark.parametrize("style", ["prepare", "bare"])
def test_features_for_the_programs_own_net_train_the_same_bits(tmp_path, expected, style):
    assert run(tmp_path, style) == expected


@pytest.mark.slow
def test_a_dump_that_one_trainer_asks_for_is_made_by_all(tmp_path, expected):
    results = run(tmp_path, "dump")
    for (_, losses, sizes, parameters), (_, same, (before,), these) in zip(results, expected, strict=True):
        assert (losses, parameters) == (same, these)
        assert sizes[:2] == [before, [0, 0]]
    assert results[0][2][2] == before
    middle, end, loaded = (find(tmp_path / name) for name in ("middle", "end", "loaded"))
    assert (middle.step, end.step, loaded.step) == (3, 7, 7)


@pytest.mark.slow
def test_trainers_that_ask_for_different_dumps_are_told(tmp_path):
    with pytest.raises(AssertionError) as error:
        run(tmp_path, "conflict")
    text = str(error.value)
    assert "RuntimeError: Trainers ask for different calls at the same time: dump_embedding(folder=" in text
    assert "of rank 0" in text


ALONE = """
import sys
import numpy as np, torch
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import *
from persia.embedding.optim import SGD
from persia.env import get_rank

class Own(IterableDataset):
    def __iter__(self):
        generator = np.random.default_rng(get_rank())
        for _ in range(4 + get_rank()):
            users = generator.integers(0, 9, 8).astype(np.uint64)
            label = Label((users % 2).astype(np.float32)[:, None])
            yield PersiaBatch([IDTypeFeatureWithSingleID("user", users)], labels=[label])

def train(prepared, folder):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    net.forward, layer = lambda non_ids, embeddings: layer(embeddings[0]), net.forward
    with TrainCtx(
        model=net,
        embedding_optimizer=SGD(lr=0.5),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        mixed_precision=False,
    ) as ctx:
        for number, data in enumerate(DataLoader(Own(4))):
            if prepared:
                non_ids, embeddings, (label,) = ctx.prepare_features(data)
                output = net(non_ids, embeddings)
            else:
                output, (label,) = ctx.forward(data)
            if prepared and number == 1 and get_rank() == 1:
                try:
                    ctx.dump_checkpoint(folder)
                except RuntimeError as error:
                    print(error)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, label))
            if prepared and number == 1 and get_rank() == 1:
                ctx.dump_checkpoint(folder)
        return list(net.parameters()), ctx.get_embedding_size()

(mine, size), (same, also) = train(False, ""), train(True, sys.argv[1])
print(all(map(torch.equal, mine, same)), size == also, size)
"""


def test_trainers_without_servers_do_the_same(tmp_path):
    (tmp_path / "embedding.yml").write_text("slots_config: {user: {dim: 4}}")
    (tmp_path / "alone.py").write_text(ALONE)
    command = [
        sys.executable,
        "-m",
        "karvan",
        "run",
        "--as",
        "persia",
        tmp_path / "alone.py",
        tmp_path / "run",
    ]
    base = {**os.environ, "PERSIA_EMBEDDING_CONFIG": str(tmp_path / "embedding.yml"), "KARVAN_THREADS": "1"}
    started = [
        ForkedProgram(list(map(str, command)), env={**base, **one}, stdout=PIPE, stderr=PIPE)
        for one in environments(2)
    ]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    last = [output.splitlines()[-1].split(maxsplit=2) for output, _ in results]
    assert [words[:2] for words in last] == [["True", "True"]] * 2
    assert sum(json.loads(words[2])[0] for words in last) == 9
    assert "dump_checkpoint was called in the middle of a step" in results[1][0]
    assert find(tmp_path / "run").step == 2


@pytest.mark.slow
def test_a_bad_gradient_of_one_trainer_skips_its_slot(tmp_path, expected):
    results = run(tmp_path, "nan")
    for (_, losses, (_, *tables), parameters), (_, same, *_) in zip(results, expected, strict=True):
        assert losses[:2] == same[:2]
        assert losses[3:] != same[3:]
        assert all(finite for finite, _ in tables)
        assert all(value == value for value in parameters)
    mine, others = (sizes[1:] for _, _, sizes, _ in results)
    assert [one + other for (_, one), (_, other) in zip(mine, others, strict=True)] == [1, 0]
