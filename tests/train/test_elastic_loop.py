"""Loops written by hand whose gradients are averaged over the trainers of an elastic group."""

import threading
import warnings
from contextlib import closing, contextmanager

import pytest
import torch
from role_loaders import in_threads

import karvan as kv
from karvan.discovery.registry import Registry
from karvan.distributed.collectives import RankError
from karvan.distributed.elastic import ElasticGroup, GroupClient
from karvan.distributed.wire_store import WireStore
from karvan.train import elastic_loop
from karvan.train.elastic_loop import ElasticLoop
from karvan.work.trainer_group import TrainerGroup


class Trainer:
    """A trainer in a thread: a model of its own, and its loop."""

    def __init__(self, group, seed, global_batches=None):
        torch.manual_seed(seed)
        self.group = group
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.loop = ElasticLoop(self.model, self.optimizer, group, global_batches=global_batches)

    def train(self, batches):
        for batch in batches:
            self.loop.begin(len(batch))
            train(self.model, self.optimizer, [batch])

    def parameters(self):
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])


@contextmanager
def trainers(tmp_path, *names, least=2, global_batches=None):
    service = TrainerGroup(tmp_path / "group.json", least=least, lost_after=60.0)
    with closing(Registry(beside=[service])) as registry:
        groups = [
            ElasticGroup(
                GroupClient(registry.address, name), WireStore(registry.address, 0), transport="network"
            )
            for name in names
        ]
        made = [Trainer(group, seed, global_batches) for seed, group in enumerate(groups)]
        yield made
        for group in groups:
            group.close()


def batches_of(seed, count):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, generator=random) for _ in range(count)]


def train(model, optimizer, batches):
    """One step of the mean of the losses of batches."""
    optimizer.zero_grad()
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()
    optimizer.step()


def reference(seed, steps):
    """The loop of one process whose steps have these batches, beginning as the trainer of a seed does."""
    alone = Trainer(None, seed)
    for batches in steps:
        train(alone.model, alone.optimizer, batches)
    return alone.parameters()


def run(*work):
    """Each in a thread, to the end."""
    in_threads(list(work))


def first_of(made):
    """The trainer whose state the others have begun with."""
    return next(index for index, each in enumerate(made) if each.group.rank == 0)


def test_a_step_has_the_mean_of_all_trainers(tmp_path):
    data = [batches_of(10, 6), batches_of(11, 6)]
    with trainers(tmp_path, "one", "two") as made:
        run(*(lambda t=t, d=d: t.train(d) for t, d in zip(made, data, strict=True)))
        leader = first_of(made)
        run(*(each.loop.finish for each in made))
    expected = reference(leader, zip(*data, strict=True))
    for each in made:
        assert torch.allclose(each.parameters(), expected, atol=1e-6)
        assert (each.loop.steps, each.loop.batches) == (6, 12)
    assert torch.equal(made[0].parameters(), made[1].parameters())


def test_a_trainer_without_batches_takes_part_in_the_steps_of_others(tmp_path):
    data = batches_of(10, 4)
    with trainers(tmp_path, "one", "two") as made:
        run(lambda: (made[0].train(data), made[0].loop.finish()), made[1].loop.finish)
        assert torch.equal(made[0].parameters(), made[1].parameters())
    assert [(each.loop.steps, each.loop.batches) for each in made] == [(4, 4)] * 2


@pytest.mark.parametrize("global_batches", [None, 2])
def test_a_step_has_the_learning_rate_of_the_first_trainer_with_a_batch(tmp_path, global_batches):
    data = batches_of(10, 8)
    with trainers(tmp_path, "one", "two", global_batches=global_batches) as made:

        def schedule():  # which the other one, who waits for records, has not come to
            made[0].train(data[:4])
            made[0].optimizer.param_groups[0].update(lr=0.01, betas=(0.5, 0.9))
            made[0].train(data[4:])
            made[0].loop.finish()

        run(schedule, made[1].loop.finish)
        assert torch.equal(made[0].parameters(), made[1].parameters())
        settings = [each.optimizer.param_groups[0] for each in made]
        assert [(each["lr"], each["betas"]) for each in settings] == [(0.01, (0.5, 0.9)), (0.1, (0.9, 0.999))]


def test_a_trainer_that_joins_has_the_state_of_the_others(tmp_path):
    data = [batches_of(10, 5), batches_of(11, 2)]
    with trainers(tmp_path, "one", "two", least=1) as made:
        made[0].train(data[0][:3])
        assert made[0].loop.world_size == 1

        def join():
            made[1].train(data[1])
            assert made[1].loop.steps > 3
            made[1].loop.finish()

        joining = threading.Thread(target=join)
        joining.start()
        while not made[0].group.regroup_wanted:
            joining.join(0.01)
        run(lambda: (made[0].train(data[0][3:]), made[0].loop.finish()))
        joining.join(60)
        assert torch.equal(made[0].parameters(), made[1].parameters())
        assert (made[0].loop.batches, made[1].loop.batches) == (7, 7)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_trainer_that_misses_the_end_of_a_sum_gets_it_from_another(tmp_path, monkeypatch, at):
    data = [batches_of(10, 6), batches_of(11, 6)]
    add_up, calls = elastic_loop.ordered_sum, []

    def interrupted(channel, mine, ranks):
        total = add_up(channel, mine, ranks)
        if threading.current_thread().name == "interrupted":
            calls.append(total)
            if len(calls) == at:
                channel.leave()
                raise RankError("as if the others were lost")
        return total

    monkeypatch.setattr(elastic_loop, "ordered_sum", interrupted)
    with trainers(tmp_path, "one", "two") as made:

        def work(each, batches):
            each.train(batches)
            each.loop.finish()

        threads = [
            threading.Thread(target=work, args=pair, name=name)
            for pair, name in zip(zip(made, data, strict=True), ("whole", "interrupted"), strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert torch.equal(made[0].parameters(), made[1].parameters())
        assert [(each.loop.steps, each.loop.batches) for each in made] == [(6, 12)] * 2
    found = [
        torch.allclose(made[0].parameters(), reference(seed, zip(*data, strict=True)), atol=1e-6)
        for seed in (0, 1)
    ]
    assert sum(found) == 1  # of whichever trainer was the first


def test_a_step_of_global_batches_is_the_mean_of_those_of_all_trainers(tmp_path):
    data = [batches_of(10, 4), batches_of(11, 2)]
    with trainers(tmp_path, "one", "two", global_batches=3) as made:
        run(*(each.loop.begin for each in made))
        first = first_of(made)  # it computes two batches of a step, the other one
        work = [(made[first], data[0]), (made[1 - first], data[1])]
        run(*(lambda t=t, d=d: (t.train(d), t.loop.finish()) for t, d in work))
    steps = [[*data[0][:2], data[1][0]], [*data[0][2:], data[1][1]]]
    expected = reference(first, steps)
    for each in made:
        assert torch.allclose(each.parameters(), expected, atol=1e-6)
        assert (each.loop.steps, each.loop.batches, each.loop.samples) == (2, 6, 30)


def test_trainers_with_records_compute_the_global_batches_of_those_without(tmp_path):
    data = batches_of(10, 7)
    with trainers(tmp_path, "one", "two", global_batches=3) as made:
        run(*(each.loop.begin for each in made))
        first = first_of(made)
        run(lambda: (made[0].train(data), made[0].loop.finish()), made[1].loop.finish)
    expected = reference(first, [data[:3], data[3:6], data[6:]])  # there are no more for the last step
    for each in made:
        assert torch.allclose(each.parameters(), expected, atol=1e-6)
        assert (each.loop.steps, each.loop.batches) == (3, 7)


def test_the_global_batches_of_a_trainer_that_is_lost_are_computed_by_the_others(tmp_path):
    data, lost = batches_of(10, 8), batches_of(11, 3)
    with trainers(tmp_path, "one", "two", global_batches=4) as made:
        run(*(each.loop.begin for each in made))
        first = first_of(made)

        def leave():
            made[1].train(lost)
            assert (made[1].loop.steps, made[1].loop.accumulated) == (1, 1)
            made[1].group.leave()

        run(lambda: (made[0].train(data), made[0].loop.finish()), leave)
        loop = made[0].loop
        assert (loop.steps, loop.batches, loop.computed) == (3, 10, 8)
        steps = [[*data[:2], *lost[:2]], data[2:6], data[6:]]
        assert torch.allclose(made[0].parameters(), reference(first, steps), atol=1e-6)


@pytest.mark.parametrize("zeroed", ["optimizer", "model"])
def test_a_trainer_that_is_alone_accumulates_global_batches(zeroed):
    alone, data = Trainer(None, 0, global_batches=3), batches_of(10, 7)
    scheduler = torch.optim.lr_scheduler.StepLR(alone.optimizer, 1, gamma=1.0)  # it wraps optimizer.step, too
    for batch in data:
        alone.loop.begin()
        getattr(alone, zeroed).zero_grad()
        alone.model(batch).square().mean().backward()
        alone.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert (alone.loop.steps, alone.loop.accumulated) == (2, 1)
    alone.loop.finish()
    assert torch.allclose(alone.parameters(), reference(0, [data[:3], data[3:6], data[6:]]), atol=1e-6)


def test_a_step_before_the_first_meeting_is_an_error(tmp_path):
    error = pytest.raises(RuntimeError, match=r"expects begin\(\) before each batch")
    with trainers(tmp_path, "one", least=1) as (trainer,), error:
        train(trainer.model, trainer.optimizer, batches_of(0, 1))


def test_what_cannot_be_averaged_is_refused(tmp_path):
    with trainers(tmp_path, "one", least=1) as (trainer,):
        trainer.loop.begin()
        with pytest.raises(RuntimeError, match="without a closure"):
            trainer.optimizer.step(lambda: 0.0)
        with pytest.raises(ValueError, match="a model without embedding tables"):
            ElasticLoop(kv.EmbeddingEngine({"user": kv.Table(2)}), trainer.optimizer, trainer.group)
        sparse = torch.nn.Embedding(3, 2, sparse=True)
        loop = ElasticLoop(sparse, torch.optim.SGD(sparse.parameters(), lr=1.0), trainer.group)
        loop.begin()
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match=r"dense gradients, got torch\.sparse_coo"):
            loop._optimizer.step()
