"""Mode async with `pull_every`: trainers that make steps of their own between two pulls, over the wire."""

import numpy as np
import pytest
import torch
from async_helpers import Intruder, assert_same, connected, content
from async_programs import batches, loss, trainer_of
from cluster_helpers import serving
from ranks_helpers import run

import karvan as kv
from karvan import distributed
from karvan.dense.remote import DenseServerProxy


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("momentum", 3),
        ("adam", 1),
        ("adam", 50),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("momentum", 1), ("momentum", 50), ("adam", 3))
        ),
    ],
)
def test_one_trainer_has_the_bits_of_memory_however_seldom_it_pulls(tmp_path, name, every):
    makers = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }

    def fit(folder, steps):
        trainer = trainer_of(
            folder,
            dense=makers[name],
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            gradient_accumulation_steps=2,
            clip_norm=0.05,
            dropout=0.2,
            checkpoint_every=4,
        )
        data = batches()
        data[5]["label"][0] = torch.nan  # one step is skipped
        trainer.fit(data, epochs=3, max_steps=steps, eval_data=batches(2), eval_every=3)
        return trainer

    fit(tmp_path / "memory", 13)
    for steps in (7, 13):  # the second one resumes
        with connected(2, pull_every=every):
            dense = fit(tmp_path / "async", steps).dense
    assert dense.staleness.largest == 0
    assert_same(tmp_path / "async", tmp_path / "memory", 13)


@pytest.mark.parametrize("servers", [(0,), (0, 1)])
def test_a_rejected_step_is_computed_again_after_a_pull_and_rows_see_it_once(tmp_path, servers):
    def fit(folder, times):
        trainer = trainer_of(folder, loss=Intruder(times, servers=servers))
        trainer.fit(batches(8), epochs=2)
        return trainer

    fit(tmp_path / "memory", 0)
    with connected(2, tolerance=0, pull_every=4):
        staleness = fit(tmp_path / "async", 5).dense.staleness
    assert (staleness.rejected, staleness.pushes, staleness.largest) == (5, 16 + 5, 1)
    if servers == (0, 1):
        assert_same(tmp_path / "async", tmp_path / "memory", 16)
        return
    # The other server has applied the first attempts, whose gradients were those of older parameters.
    (found, _), (expected, _) = content(tmp_path / "async", 16), content(tmp_path / "memory", 16)
    for table in ("user", "item"):
        for column in (0, 3, 4):  # keys, how often each was used, and when
            np.testing.assert_array_equal(found[table, column], expected[table, column])


class Mover:
    """A loss during which somebody else moves a parameter on the servers."""

    def __call__(self, output, batch):
        for number in range(2):
            server = DenseServerProxy(distributed.current().servers, number, 1)
            version, parameters = server.pull()
            push = {name: torch.ones(6) for name in parameters if name == "net.0.bias"}
            server.push_gradients(push, version, trainer="b", sequence=server.next_sequence("b"))
        return loss(output, batch)


def servers_have():
    found = {}
    for number in range(2):
        found |= DenseServerProxy(distributed.current().servers, number, 1).pull()[1]
    return {name: torch.tensor(each) for name, each in found.items()}


class Watch(kv.callbacks.Callback):
    """Whether the model has what the servers have: after steps, and in evaluations."""

    def __init__(self):
        self.after_steps, self.evaluated, self.counts = [], [], []

    def same(self, trainer):
        servers = servers_have()
        return all(torch.equal(each, servers[name]) for name, each in trainer.model.named_parameters())

    def on_step_end(self, trainer, logs):
        self.after_steps.append(self.same(trainer))
        self.counts.append(trainer.dense.staleness.total)

    def on_evaluate_end(self, trainer, metrics):
        self.evaluated.append(self.same(trainer))


def test_evaluations_and_checkpoints_have_the_servers_parameters(tmp_path):
    with connected(2, pull_every=4):
        watch, mover = Watch(), Mover()
        trainer = trainer_of(tmp_path, dense=lambda p: torch.optim.SGD(p, 0.1), callbacks=[watch], loss=mover)
        trainer.evaluate = lambda data: {"loss": 0.0}  # without a loss that moves parameters
        trainer.fit(batches(6), eval_data=batches(1), eval_every=3, max_steps=6)
        servers, model = servers_have(), dict(trainer.model.named_parameters())
    assert watch.after_steps == [False] * 6  # in between, the trainer has its own
    assert watch.evaluated == [True, True]
    # Before each push one more step of somebody else; after a pull it counts again from there.
    assert watch.counts == [1, 3, 6, 7, 9, 12]
    saved, _ = content(tmp_path, 6)
    for name, value in servers.items():
        assert torch.equal(value, model[name])
        assert torch.equal(value, saved[name])


@pytest.mark.slow
def test_trainers_that_seldom_pull_learn_and_end_with_what_the_servers_have(tmp_path):
    options = {"mode": "async", "staleness": 2, "pull_every": 4, "checkpoints": str(tmp_path)}
    with serving(2) as addresses:
        one, other = run(2, "async_programs:together", steps=60, counts=[12, 9], servers=addresses, **options)
    for each in (one, other):
        half = len(each["losses"]) // 2
        assert np.nanmean(each["losses"][half:]) < np.nanmean(each["losses"][:half]) - 0.05
        assert each["staleness"]["largest"] > 0
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert one["result"]["evaluation"] == other["result"]["evaluation"]
    assert (one["staleness"]["pushes"], other["staleness"]["pushes"]) == (60, 45)
    assert [each["1"]["version"] for each in one["told"]] == [105, 105]
    alone = trainer_of(tmp_path)
    alone.fit(batches(), epochs=5)  # loads, and has nothing more to do
    assert all(torch.equal(each, one["model"][name]) for name, each in alone.model.named_parameters())


@pytest.mark.slow
def test_loops_of_trainers_that_seldom_pull_end_with_what_the_servers_have():
    with serving(1) as addresses:
        options = {"servers": addresses, "mode": "async", "staleness": 2, "pull_every": 3}
        one, other = run(2, "async_programs:loop", epochs=5, counts=[12, 9], **options)
    assert (one["staleness"]["pushes"], other["staleness"]["pushes"]) == (60, 45)
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert torch.equal(one["evaluated"], other["evaluated"])


@pytest.mark.parametrize("options", [{"dense_reduce": "bf16"}, {"average_every": 2}])
def test_what_averages_gradients_is_refused_where_servers_have_the_parameters(options):
    with connected(1):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is for ranks that average dense grad"):
            trainer_of(**options)
        assert trainer_of(find_unused_parameters=True).fit(batches(2)).step == 2
