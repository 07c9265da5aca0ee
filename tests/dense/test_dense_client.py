"""A trainer whose dense parameters are on servers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dense_helpers import MAKERS, backward, batches, make_model, make_servers, new_state, same

from karvan.dense.remote import AsyncDense, split_state
from karvan.dense.wire_format import describe
from karvan.job.environment import DenseSettings


def join(dense, model, optimizer, servers):
    """Join servers, which have the first trainer's model."""
    if not servers[0].ready:
        state = new_state(dict(model.named_parameters()), describe(optimizer))
        for server, share in zip(servers, split_state(state, len(servers)), strict=True):
            server.load_state(share)
    dense.join()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_one_trainer_has_the_bits_of_a_plain_loop(name, servers):
    plain, model = make_model(), make_model()
    optimizers = [MAKERS[name](each.parameters()) for each in (plain, model)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    made = make_servers(servers)
    dense = AsyncDense(model, optimizers[1], made, trainer="a")
    join(dense, model, optimizers[1], made)
    for batch in batches(6):
        optimizers[0].zero_grad()
        backward(plain, batch)
        optimizers[0].step()
        backward(model, batch)
        assert dense.step() == "accepted"
        assert dense.before_step()
        for schedule in schedules:
            schedule.step()
        same(model.named_parameters(), plain.named_parameters())
    assert not dense.before_step()
    assert (dense.staleness.pushes, dense.staleness.largest, dense.staleness.mean) == (6, 0, 0.0)


def test_schedulers_and_hooks_see_steps_that_were_accepted(recwarn):
    model, steps = make_model(), []
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    servers = make_servers(1, DenseSettings(grads_to_wait=1))
    dense = AsyncDense(model, optimizer, servers, trainer="a")
    join(dense, model, optimizer, servers)
    backward(model, batches(1)[0])
    assert dense.step() == "accepted"
    backward(model, batches(1)[0])
    assert dense.step() == "rejected"
    schedule.step()
    assert steps == [0]
    assert list(recwarn) == []


def _trainer(servers, name, seed=0, **options):
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = AsyncDense(model, optimizer, servers, trainer=name, **options)
    join(dense, model, optimizer, servers)
    return model, dense


def test_all_trainers_begin_with_the_first_ones_parameters_frozen_ones_too():
    servers = make_servers(2)
    with ThreadPoolExecutor(2) as pool:
        model, _ = _trainer(servers, "a", 0, call=pool.map)
        other = make_model(1)
        other[0].requires_grad_(False)
        optimizer = torch.optim.SGD(other[2].parameters(), lr=0.1)
        dense = AsyncDense(other, optimizer, servers, trainer="b", call=pool.map)
        dense.join()
        same(model.named_parameters(), other.named_parameters())
        backward(other, batches(1)[0])
        assert dense.step() == "accepted"
        dense.before_step()
    same(model[0].named_parameters(), other[0].named_parameters())
    same(model[4].named_parameters(), other[4].named_parameters())  # not the optimizer's
    assert not torch.equal(model[2].weight, other[2].weight)


def test_a_rejected_push_is_retried_on_fresh_parameters():
    servers = make_servers(2, DenseSettings(grads_to_wait=1))
    (one, fast), (two, slow) = (_trainer(servers, name) for name in "ab")
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    first, second = batches(2)
    for batch in (first, second):
        optimizer.zero_grad()
        backward(plain, batch)
        optimizer.step()
    backward(two, second)
    backward(one, first)
    assert fast.step() == "accepted"
    assert slow.step() == "rejected"
    assert (slow.staleness.rejected, slow.staleness.largest) == (1, 1)
    assert slow.before_step()
    backward(two, second)  # had the rejected gradients stayed, there would be twice as many
    assert slow.step() == "accepted"
    slow.before_step()
    same(two.named_parameters(), plain.named_parameters())
    assert slow.staleness.mean == 0.5


def test_a_push_that_some_servers_reject_is_applied_once_by_each():
    servers = make_servers(2, DenseSettings(grads_to_wait=1))
    model, dense = _trainer(servers, "a")
    servers[1].push_gradients({}, 0, trainer="b", sequence=0)
    batch = batches(1)[0]
    backward(model, batch)
    assert dense.step() == "rejected"
    dense.before_step()
    backward(model, batch)
    assert dense.step() == "accepted"
    assert [server.pull()[0] for server in servers] == [1, 2]
    assert [server.counts.accepted for server in servers] == [1, 2]
    assert servers[0].counts.repeated == 1


class Flaky:
    """A server whose first answer to each push is lost on its way back, or which is not reached at all."""

    def __init__(self, server, reached):
        self._server, self._reached, self._failed = server, reached, set()

    def __getattr__(self, name):
        return getattr(self._server, name)

    def push_gradients(self, gradients, version, **options):
        if options["sequence"] not in self._failed:
            self._failed.add(options["sequence"])
            if self._reached:
                self._server.push_gradients(gradients, version, **options)
            raise ConnectionError("lost")
        return self._server.push_gradients(gradients, version, **options)


@pytest.mark.parametrize("reached", [True, False])
def test_a_step_that_failed_can_be_called_again(reached):
    plain, model = make_model(), make_model()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, model)]
    servers = make_servers(3)
    dense = AsyncDense(
        model, optimizers[1], [servers[0], Flaky(servers[1], reached), servers[2]], trainer="a"
    )
    join(dense, model, optimizers[1], servers)
    for batch in batches(3):
        optimizers[0].zero_grad()
        backward(plain, batch)
        optimizers[0].step()
        backward(model, batch)
        with pytest.raises(ConnectionError):
            dense.step()
        assert dense.step() == "accepted"
        dense.before_step()
    same(model.named_parameters(), plain.named_parameters())


def test_a_trainer_that_starts_again_under_its_name_goes_on():
    servers = make_servers(2)
    for lives in range(1, 4):
        model, dense = _trainer(servers, "a")
        for batch in batches(2):
            dense.before_step()
            backward(model, batch)
            assert dense.step() == "accepted"
        assert [server.pull()[0] for server in servers] == [2 * lives, 2 * lives]


def test_gradients_that_are_not_finite_reach_no_server():
    servers = make_servers(3)
    model, dense = _trainer(servers, "a")
    backward(model, batches(1)[0])
    model[4].bias.grad.fill_(float("inf"))
    assert dense.step() == "not finite"
    assert [server.pull()[0] for server in servers] == [0, 0, 0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_trainers_see_their_staleness():
    servers = make_servers(1)
    (one, first), (two, second) = (_trainer(servers, name) for name in "ab")
    for batch in batches(3):
        first.before_step()
        backward(one, batch)
        first.step()
    backward(two, batch)
    assert second.step() == "accepted"
    assert (second.staleness.largest, second.staleness.mean) == (3, 3.0)
    assert (first.staleness.largest, first.staleness.mean) == (0, 0.0)


def test_wrong_trainers():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="at least one server"):
        AsyncDense(model, optimizer, [], trainer="a")
    with pytest.raises(ValueError, match="has 6 parameters, but 6 do not belong to the model"):
        AsyncDense(make_model(), optimizer, make_servers(1), trainer="a")
    dense = AsyncDense(model, optimizer, make_servers(1), trainer="a")
    with pytest.raises(RuntimeError, match=r"expected join\(\) first"):
        dense.step()


def test_a_learning_rate_for_each_group_is_refused_when_it_comes():
    model = make_model()
    groups = [{"params": list(each.parameters())} for each in model if len(list(each.parameters()))]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    servers = make_servers(1)
    dense = AsyncDense(model, optimizer, servers, trainer="a")
    join(dense, model, optimizer, servers)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5, lambda _: 1.0])
    with pytest.raises(ValueError, match=r"share it, got 0\.25, 0\.5"):
        dense.step()
