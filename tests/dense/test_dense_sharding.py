"""States of dense parameters: on any number of servers, training goes on with the same bits."""

import copy

import pytest
import torch
from dense_helpers import (
    MAKERS,
    make_model,
    make_servers,
    one_server,
    push,
    same,
    start_with,
    through_a_checkpoint,
    values_of,
)

from karvan.checkpoint.state_tree import encode
from karvan.cluster.parameter_server.dense_parameters import DenseParameters
from karvan.dense.remote import merge_states, owner_of_parameter, split_state
from karvan.dense.wire_format import describe
from karvan.job.environment import DenseSettings


def test_owners_of_parameters_are_pinned():
    names = ["0.weight", "0.bias", "net.out.weight", "é", ""]
    assert {count: [owner_of_parameter(name, count) for name in names] for count in (1, 2, 3, 8)} == {
        1: [0, 0, 0, 0, 0],
        2: [0, 1, 0, 0, 1],
        3: [0, 1, 0, 0, 1],
        8: [2, 4, 2, 0, 4],
    }


def _loaded(states, settings):
    servers = make_servers(len(states), settings)
    for server, state in zip(servers, states, strict=True):
        server.load_state(state)
    return servers


def _resharded(servers, count, settings):
    merged = merge_states([server.state() for server in servers])
    return _loaded([through_a_checkpoint(each) for each in split_state(merged, count)], settings)


def _push_all(servers, gradients, version, trainer, sequence):
    for number, server in enumerate(servers):
        share = {n: g for n, g in gradients.items() if owner_of_parameter(n, len(servers)) == number}
        yield server.push_gradients(share, version, trainer=trainer, sequence=sequence, lr=0.02)


@pytest.mark.parametrize("wait", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_servers_goes_on_with_the_bits_of_one_that_was_never_stopped(name, wait):
    model = make_model()
    settings = DenseSettings(grads_to_wait=wait) if wait > 1 else DenseSettings(lr_staleness=True)
    straight, servers = DenseParameters(settings), make_servers(1, settings)
    for server in (straight, *servers):
        start_with(server, dict(model.named_parameters()), describe(MAKERS[name](model.parameters())))
    generator = torch.Generator().manual_seed(5)
    for sequence, count in enumerate((1, 2, 3, 1, 5, 1)):
        servers = _resharded(servers, count, settings)
        for trainer in ("a", "b"):  # with wait 3, states are taken with nothing, two and one waiting
            gradients = {
                n: torch.randn(p.shape, generator=generator)
                for n, p in model.named_parameters()
                if sequence or n != "4.bias"
            }
            version = max(0, straight.pull()[0] - (trainer == "b" and wait == 1))
            answer = straight.push_gradients(gradients, version, trainer=trainer, sequence=sequence, lr=0.02)
            assert answer.accepted
            assert list(_push_all(servers, gradients, version, trainer, sequence)) == [answer] * count
            servers = _resharded(servers, count, settings)  # and a repeat changes nothing after it
            assert list(_push_all(servers, gradients, version, trainer, sequence)) == [answer] * count
    same(servers[0].pull()[1], straight.pull()[1])
    assert encode(servers[0].state())[0] == encode(straight.state())[0]
    ours, theirs = encode(servers[0].state())[1], encode(straight.state())[1]
    assert {n: each.data.tobytes() for n, each in ours.items()} == {
        n: each.data.tobytes() for n, each in theirs.items()
    }


def test_a_state_is_of_its_moment():
    server = one_server(
        DenseSettings(grads_to_wait=2), {"name": "SGD", "options": {"lr": 1.0, "momentum": 0.5}}
    )
    for sequence in range(3):
        push(server, 2, sequence // 2, "a", sequence)
    state = server.state()
    kept = copy.deepcopy(state)
    push(server, 2, 1, "b", 0)
    other = DenseParameters(DenseSettings(grads_to_wait=2))
    other.load_state(state)
    push(other, 2, 1, "b", 0)
    assert values_of(other) == values_of(server)
    assert str(state) == str(kept)


def test_a_state_may_be_loaded_by_other_settings():
    server = one_server(DenseSettings(grads_to_wait=3))
    push(server, 1, 0, "a")
    push(server, 3, 0, "b")
    other = DenseParameters()
    other.load_state(server.state())
    assert other.pull(0)[0] == 1
    assert values_of(other) == [-1.0, -1.0]


def test_states_of_different_moments():
    servers = make_servers(2, DenseSettings(grads_to_wait=2))
    for number, server in enumerate(servers):
        start_with(server, {str(number): torch.zeros(1)})
    servers[0].push_gradients({}, 0, trainer="a", sequence=0)
    with pytest.raises(ValueError, match=r"not of one moment.*\('a', 0\)"):
        merge_states([server.state() for server in servers])
    servers[0].flush()
    merged = merge_states([server.state() for server in servers])
    assert (merged["version"], list(merged["answers"]), list(merged["parameters"])) == (1, ["a"], ["0", "1"])


def test_states_that_do_not_go_together():
    state = one_server().state()
    with pytest.raises(ValueError, match=r"on several: w"):
        merge_states([state, state])
    with pytest.raises(ValueError, match="same optimizer"):
        merge_states([state, one_server(optimizer={"name": "Adam", "options": {}}).state()])
    with pytest.raises(ValueError, match="at least one server"):
        merge_states([])
    with pytest.raises(ValueError, match="servers must be at least 1, got 0"):
        owner_of_parameter("w", 0)
    with pytest.raises(ValueError, match="it has no answers, slots"):
        DenseParameters().load_state({k: v for k, v in state.items() if k not in ("answers", "slots")})
