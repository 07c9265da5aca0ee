"""Trainers that pull every k-th step and make steps of their own in between, against a slow model of them."""

from dataclasses import dataclass, field

import pytest
import torch
from dense_helpers import MAKERS, backward, batches, make_model, make_servers, new_state, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from karvan.dense.remote import AsyncDense, split_state
from karvan.dense.wire_format import describe
from karvan.job.environment import DenseSettings

RATE, MOMENTUM = 0.1, 0.5


def fill(servers, model, optimizer):
    state = new_state(dict(model.named_parameters()), describe(optimizer))
    for server, share in zip(servers, split_state(state, len(servers)), strict=True):
        server.load_state(share)


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adagrad", "fused"])
def test_one_trainer_has_the_bits_of_a_plain_loop_however_seldom_it_pulls(name, servers, every):
    plain, model = make_model(), make_model()
    optimizers = [MAKERS[name](each.parameters()) for each in (plain, model)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    made = make_servers(servers)
    dense = AsyncDense(model, optimizers[1], made, trainer="a", pull_every=every)
    fill(made, model, optimizers[1])
    dense.join()
    for number, batch in enumerate(batches(7)):
        optimizers[0].zero_grad()
        backward(plain, batch)
        optimizers[0].step()
        pulled = dense.before_step()
        assert pulled == (number > 0 and number % every == 0)
        backward(model, batch)
        assert dense.step() == "accepted"
        for schedule in schedules:
            schedule.step()
        if every > 1:
            same(model.named_parameters(), plain.named_parameters())
    dense.pull()
    same(model.named_parameters(), plain.named_parameters())
    # A trainer's own steps are in its parameters, so its gradients are not behind.
    assert vars(dense.staleness) == {"pushes": 7, "largest": 0, "total": 0, "rejected": 0}


class Point(nn.Module):
    """Two vectors, perhaps on different servers; the gradient of `loss` is their distance to a target."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    def loss(self, target):
        return ((self.first - target) ** 2).sum() / 2 + ((self.second + target) ** 2).sum() / 2


@dataclass
class Place:
    """A point and the momentum of its steps, in plain numbers; `second` is -`first` all the time."""

    value: float = 0.0
    speed: float = 0.0

    def step(self, gradient):
        self.speed = MOMENTUM * self.speed + gradient
        self.value -= RATE * self.speed


@dataclass
class SlowTrainer:
    """A trainer, written as the documentation says it."""

    place: Place = field(default_factory=Place)
    pulled: int = 0  # how many steps the servers had made
    left: int = 0
    staleness: list = field(default_factory=list)
    rejected: int = 0


class SlowJob:
    """Servers and trainers: one thing after the other."""

    def __init__(self, every, tolerance):
        self.every, self.tolerance = every, tolerance
        self.server = Place()
        self.log = []  # who made each of the servers' steps
        self.trainers = {name: SlowTrainer() for name in "abc"}

    def pull(self, trainer):
        trainer.place.value, trainer.pulled = self.server.value, len(self.log)

    def step(self, name, target):
        trainer = self.trainers[name]
        if trainer.left == 0:
            self.pull(trainer)
            trainer.left = self.every
        trainer.left -= 1
        behind = sum(1 for who in self.log[trainer.pulled :] if who != name)
        trainer.staleness.append(behind)
        gradient = trainer.place.value - target
        if self.tolerance is not None and behind > self.tolerance:
            trainer.rejected += 1
            self.pull(trainer)
            trainer.left = 0
            trainer.staleness.append(0)
            gradient = trainer.place.value - target
        self.server.step(gradient)
        self.log.append(name)
        if self.every > 1:
            trainer.place.step(gradient)


@settings(deadline=None, max_examples=60)
@given(
    every=st.integers(1, 5),
    tolerance=st.sampled_from([None, 0, 1, 3]),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4)), max_size=30),
    count=st.integers(1, 2),
)
def test_trainers_do_what_a_slow_model_of_them_does(every, tolerance, steps, count):
    settings = DenseSettings() if tolerance is None else DenseSettings(grads_to_wait=1, tolerance=tolerance)
    servers = make_servers(count, settings)
    slow, trainers = SlowJob(every, tolerance), {}
    for name in "abc":
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        trainers[name] = model, AsyncDense(model, optimizer, servers, trainer=name, pull_every=every)
    fill(servers, model, optimizer)
    for _, dense in trainers.values():
        dense.join()
    for name, target in steps:
        model, dense = trainers[name]
        for _ in range(2):
            dense.before_step()
            model.loss(float(target)).backward()
            outcome = dense.step()
            if outcome != "rejected":
                break
        assert outcome == "accepted"
        slow.step(name, float(target))
        if every > 1 and slow.trainers[name].left:
            expected = slow.trainers[name].place.value
            torch.testing.assert_close(model.first.detach(), torch.full((2,), expected), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model.second.detach(), -model.first.detach(), rtol=1e-5, atol=1e-5)
    for name, (_, dense) in trainers.items():
        seen, expected = dense.staleness, slow.trainers[name]
        assert (seen.pushes, seen.total) == (len(expected.staleness), sum(expected.staleness))
        assert (seen.largest, seen.rejected) == (max(expected.staleness, default=0), expected.rejected)
    assert [server.version for server in servers] == [len(steps)] * count
    for name, (model, dense) in trainers.items():
        dense.pull()
        torch.testing.assert_close(
            model.first.detach(), torch.full((2,), slow.server.value), rtol=1e-5, atol=1e-5, msg=name
        )


def test_a_pull_takes_the_servers_parameters_also_if_they_have_made_no_step():
    """A push that waits for others is a step here and none there."""
    servers = make_servers(1, DenseSettings(grads_to_wait=2, tolerance=5))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = AsyncDense(model, optimizer, servers, trainer="a", pull_every=4)
    fill(servers, model, optimizer)
    dense.join()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    dense.before_step()
    backward(model, batches(1)[0])
    assert dense.step() == "accepted"
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert dense.pull()
    same(model.named_parameters(), before.items())


def test_a_step_that_is_not_finite_is_made_neither_here_nor_there():
    servers = make_servers(1)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    dense = AsyncDense(model, optimizer, servers, trainer="a", pull_every=3)
    fill(servers, model, optimizer)
    dense.join()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    dense.before_step()
    backward(model, batches(1)[0])
    model[4].bias.grad.fill_(float("nan"))
    assert dense.step() == "not finite"
    same(model.named_parameters(), before.items())
    assert (servers[0].version, dict(optimizer.state)) == (0, {})


class LosesAnswers:
    """A server whose first answer to every push is lost on its way back."""

    def __init__(self, server):
        self._server, self._lost = server, set()

    def __getattr__(self, name):
        return getattr(self._server, name)

    def push_gradients(self, gradients, version, **options):
        answer = self._server.push_gradients(gradients, version, **options)
        if options["sequence"] not in self._lost:
            self._lost.add(options["sequence"])
            raise ConnectionError("lost")
        return answer


def test_a_step_whose_answer_was_lost_is_made_once_here_and_there():
    plain, model = make_model(), make_model()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, model)]
    servers = make_servers(2)
    dense = AsyncDense(
        model, optimizers[1], [LosesAnswers(servers[0]), servers[1]], trainer="a", pull_every=3
    )
    fill(servers, model, optimizers[1])
    dense.join()
    for batch in batches(5):
        optimizers[0].zero_grad()
        backward(plain, batch)
        optimizers[0].step()
        dense.before_step()
        backward(model, batch)
        with pytest.raises(ConnectionError):
            dense.step()
        assert dense.step() == "accepted"
        same(model.named_parameters(), plain.named_parameters())
    assert (dense.staleness.largest, [server.version for server in servers]) == (0, [5, 5])


def test_a_count_of_steps_is_expected():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pull_every must be at least 1, but is 0"):
        AsyncDense(model, optimizer, make_servers(1), trainer="a", pull_every=0)
    with pytest.raises(TypeError, match="pull_every must be an integer"):
        AsyncDense(model, optimizer, make_servers(1), trainer="a", pull_every=1.5)
