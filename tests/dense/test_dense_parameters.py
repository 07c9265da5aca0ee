"""Dense parameters on a server, without a wire: when a push becomes a step, and what is answered."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from dense_helpers import (
    MAKERS,
    make_model,
    one_server,
    push,
    same,
    start_with,
    through_a_checkpoint,
    values_of,
)
from hypothesis import given
from hypothesis import strategies as st

from karvan.cluster.parameter_server.dense_parameters import DenseParameters
from karvan.dense.wire_format import describe
from karvan.job.environment import DenseSettings


def test_pull_gives_parameters_only_if_the_callers_are_older():
    server = one_server()
    assert server.pull(0) == (0, None)
    push(server, 2, 0)
    version, parameters = server.pull(0)
    assert (version, parameters["w"].tolist()) == (1, [-1.0, -1.0])
    assert server.pull(7)[1] is not None  # of a server's earlier life
    parameters["w"].fill_(9)
    assert values_of(server) == [-1.0, -1.0]


def test_what_is_pushed_may_be_written_to_afterwards():
    values = torch.ones(2)
    server = DenseParameters(DenseSettings(grads_to_wait=2))
    start_with(server, {"w": values})
    gradient = np.ones(2, dtype=np.float32)
    values.fill_(9)
    server.push_gradients({"w": gradient}, 0, trainer="a", sequence=0)
    gradient.fill(9)
    push(server, 1, 0, "b")
    assert values_of(server) == [0.5, 0.5]


def test_arrays_may_be_numpy_read_only_or_of_another_size(recwarn):
    server = DenseParameters()
    start_with(server, {"w": torch.tensor([3.0, 1.0]).double(), "b": torch.ones(3, dtype=torch.bfloat16)})
    assert {name: each.dtype for name, each in server.pull()[1].items()} == {
        "b": torch.float32,
        "w": torch.float32,
    }
    gradient = np.ones(2, dtype=np.float16)
    gradient.flags.writeable = False
    server.push_gradients({"w": gradient}, 0, trainer="a", sequence=0)
    assert server.pull()[1]["w"].tolist() == [2.5, 0.5]
    assert list(recwarn) == []


def test_async_every_push_is_a_step():
    server = one_server()
    for sequence in range(3):
        answer = push(server, 1, 0, sequence=sequence)
        assert (answer.accepted, answer.applied, answer.version) == (True, True, sequence + 1)
        assert answer.staleness == sequence
    assert values_of(server) == [-1.5, -1.5]


def test_async_learning_rate_is_divided_by_staleness_for_that_step():
    server = one_server(DenseSettings(lr_staleness=True))
    push(server, 8, 0, sequence=0)  # staleness 0
    push(server, 8, 0, sequence=1)  # 1
    push(server, 8, 0, sequence=2)  # 2
    push(server, 8, 0, sequence=3, lr=3.0)  # 3
    assert values_of(server) == [-4.0 - 4.0 - 2.0 - 8.0] * 2
    push(server, 8, 4, sequence=4)
    assert values_of(server) == [-22.0] * 2
    assert server.state()["optimizer"]["options"]["lr"] == 0.5


def test_a_push_of_no_gradient_leaves_the_parameter_alone_as_torch_does():
    server = one_server(optimizer={"name": "SGD", "options": {"lr": 1.0, "momentum": 0.5}})
    push(server, 4, 0)
    assert server.push_gradients({}, 1, trainer="a", sequence=1).version == 2
    assert values_of(server) == [-4.0, -4.0]


def test_sync_two_gradients_make_a_version():
    server = one_server(DenseSettings(grads_to_wait=2))
    first = push(server, 1, 0, "a")
    assert (first.accepted, first.applied, first.version) == (True, False, 0)
    assert values_of(server) == [0.0, 0.0]
    second = push(server, 3, 0, "b")
    assert (second.accepted, second.applied, second.version) == (True, True, 1)
    assert values_of(server) == [-1.0, -1.0]


def test_sync_a_stale_push_is_rejected_and_taken_again_with_the_same_number():
    server = one_server(DenseSettings(grads_to_wait=1))
    push(server, 1, 0, "a")
    stale = push(server, 1, 0, "b")
    assert (stale.accepted, stale.applied, stale.version, stale.reason) == (False, False, 1, "stale")
    assert push(server, 1, 0, "b") == stale
    assert push(server, 1, stale.version, "b").version == 2
    assert server.counts.rejected == 2


@pytest.mark.parametrize(("staleness", "accepted"), [(2, True), (3, False)])
def test_sync_tolerates_some_staleness(staleness, accepted):
    server = one_server(DenseSettings(grads_to_wait=1, tolerance=2))
    for version in range(staleness):
        push(server, 1, version, "a", version)
    assert push(server, 1, 0, "b").accepted is accepted


def test_sync_a_trainer_that_pushes_twice_counts_twice():
    server = one_server(DenseSettings(grads_to_wait=2))
    push(server, 1, 0, "a", 0)
    assert push(server, 3, 0, "a", 1).version == 1
    assert values_of(server) == [-1.0, -1.0]


def test_sync_what_waits_can_be_flushed():
    server = one_server(DenseSettings(grads_to_wait=3))
    assert server.flush() == 0
    push(server, 1, 0, "a")
    push(server, 3, 0, "b")
    assert server.flush() == 1
    assert values_of(server) == [-1.0, -1.0]
    assert server.flush() == 1


def test_sync_a_mean_is_over_pushes_and_has_the_mean_rate():
    server = DenseParameters(DenseSettings(grads_to_wait=2))
    start_with(server, {name: torch.zeros(1) for name in "uvw"})
    one = {"u": torch.ones(1), "v": torch.ones(1)}
    server.push_gradients(one, 0, trainer="a", sequence=0, lr=1.0)
    server.push_gradients({"u": torch.ones(1)}, 0, trainer="b", sequence=0, lr=3.0)
    assert {name: each.item() for name, each in server.pull()[1].items()} == {"u": -2.0, "v": -1.0, "w": 0.0}


@pytest.mark.parametrize("name", MAKERS)
def test_sync_a_step_is_torchs_on_the_mean_whatever_the_order_of_arrival(name):
    model, trainers = make_model(), ["t10", "t2", "t7"]
    optimizer = MAKERS[name](model.parameters())
    servers = [DenseParameters(DenseSettings(grads_to_wait=3)) for _ in range(2)]
    for server in servers:
        start_with(server, dict(model.named_parameters()), describe(optimizer))
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        gradients = {
            trainer: {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
            for trainer in trainers
        }
        for server, order in zip(servers, (trainers, trainers[::-1]), strict=True):
            for trainer in order:
                server.push_gradients(gradients[trainer], step, trainer=trainer, sequence=step)
        for n, parameter in model.named_parameters():
            parameter.grad = (gradients["t10"][n] + gradients["t2"][n] + gradients["t7"][n]) / 3
        optimizer.step()
        for server in servers:
            assert server.pull()[0] == step + 1
            same(server.pull()[1], model.named_parameters())


def test_a_repeat_is_answered_as_the_first_was():
    server = one_server(DenseSettings(grads_to_wait=2))
    first, second = push(server, 1, 0, "a"), push(server, 3, 0, "b")
    assert push(server, 99, 0, "a") == first
    assert push(server, float("nan"), 1, "b") == second
    assert (values_of(server), server.pull()[0], server.counts.repeated) == ([-1.0, -1.0], 1, 2)


def test_numbers_before_the_window_are_refused_and_trainers_are_apart():
    server = one_server(window=2)
    for sequence in (0, 5, 4):
        assert push(server, 1, 0, sequence=sequence).accepted
    for sequence in (0, 3):
        answer = push(server, 1, 0, sequence=sequence)
        assert (answer.accepted, answer.reason, answer.version) == (False, "forgotten", 3)
    assert push(server, 1, 0, "b", 0).accepted
    assert [server.next_sequence(trainer) for trainer in "abc"] == [6, 1, 0]
    server.forget("a")
    assert server.next_sequence("a") == 0


def test_gradients_that_are_not_finite_are_refused_and_counted_once():
    server = one_server()
    for value in (float("nan"), float("inf")):
        for _ in range(2):
            answer = push(server, value, 0, trainer=str(value))
            assert (answer.accepted, answer.applied, answer.version) == (False, False, 0)
            assert answer.reason == "not finite"
    assert (server.counts.not_finite, server.counts.accepted, values_of(server)) == (2, 0, [0.0, 0.0])


def test_gradients_from_a_version_that_is_still_to_come_are_rejected():
    answer = push(one_server(), 1, 3)
    assert (answer.accepted, answer.reason, answer.version) == (False, "ahead", 0)


class Reference:
    """What a server does, as slowly and plainly as can be: all that ever happened is looked through again."""

    def __init__(self, wait, tolerance, modulated, window):
        self.wait, self.tolerance, self.modulated, self.window = wait, tolerance, modulated, window
        self.counted = []  # (trainer, sequence, answer)
        self.w = torch.zeros(2)
        self.version = 0
        self.group = []

    def push(self, value, version, trainer, sequence):
        for one, number, answer in self.counted:
            if (one, number) == (trainer, sequence):
                highest = max(n for t, n, _ in self.counted if t == trainer)
                return answer if sequence > highest - self.window else (False, "forgotten")
        if any(t == trainer and n >= sequence + self.window for t, n, _ in self.counted):
            return (False, "forgotten")
        if value != value:
            answer = (False, "not finite", self.version, False)
        elif version > self.version:
            return (False, "ahead")
        elif self.tolerance is not None and version < self.version - self.tolerance:
            return (False, "stale")
        else:
            lr = 0.5 / max(1, self.version - version) if self.modulated else 0.5
            self.group.append((trainer, sequence, torch.full((2,), value), lr))
            applied = len(self.group) == self.wait
            if applied:
                total = sum(gradient for _, _, gradient, _ in sorted(self.group, key=lambda g: g[:2]))
                self.w = torch.add(self.w, total / self.wait, alpha=-lr)
                self.version += 1
                self.group = []
            answer = (True, "", self.version, applied)
        self.counted.append((trainer, sequence, answer))
        return answer


@given(st.data())
def test_repeats_and_reorderings_leave_what_a_plain_reference_has(data):
    settings, options = data.draw(
        st.sampled_from(
            [
                (DenseSettings(), (1, None, False)),
                (DenseSettings(lr_staleness=True), (1, None, True)),
                (DenseSettings(grads_to_wait=1, tolerance=0), (1, 0, False)),
                (DenseSettings(grads_to_wait=2, tolerance=1), (2, 1, False)),
                (DenseSettings(grads_to_wait=3, tolerance=2), (3, 2, False)),
            ]
        )
    )
    window = data.draw(st.integers(1, 6))
    server, reference = one_server(settings, window=window), Reference(*options, window)
    pushes = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([1.0, 2.0, 0.3, -7.0, float("nan")]),
                st.integers(-3, 1),
                st.sampled_from("abc"),
                st.integers(0, 9),
            ),
            max_size=60,
        )
    )
    for value, behind, trainer, sequence in pushes:
        version = max(0, server.pull()[0] + behind)
        answer = push(server, value, version, trainer, sequence)
        expected = reference.push(value, version, trainer, sequence)
        assert (answer.accepted, answer.reason, answer.version, answer.applied)[: len(expected)] == expected
        assert server.pull()[0] == reference.version
        assert torch.equal(server.pull()[1]["w"], reference.w)
        if data.draw(st.booleans()):
            other = DenseParameters(settings, window=window)
            other.load_state(through_a_checkpoint(server.state()))
            server = other


@pytest.mark.parametrize("settings", [DenseSettings(), DenseSettings(grads_to_wait=4, tolerance=10**9)])
def test_threads_that_push_and_pull_at_once_lose_nothing(settings):
    trainers, pushes = 8, 40
    server = one_server(settings, window=1000)
    ready = threading.Barrier(trainers)
    answers = [[] for _ in range(trainers)]

    def train(number):
        ready.wait()
        version = 0
        for sequence in range(pushes):
            for _ in range(1 + sequence % 2):  # every other one is sent twice
                answer = push(server, 1, version, str(number), sequence, lr=1.0)
            answers[number].append(answer)
            version, parameters = server.pull()
            if len(set(parameters["w"].tolist())) != 1 or -parameters["w"][0].item() != version:
                raise AssertionError("a pull between two steps")

    with ThreadPoolExecutor(trainers) as pool:
        for done in [pool.submit(train, number) for number in range(trainers)]:
            done.result()
    steps = trainers * pushes // settings.together
    made = sorted(answer.version for each in answers for answer in each if answer.applied)
    assert made == list(range(1, steps + 1))
    assert (server.pull()[0], values_of(server)) == (steps, [-float(steps)] * 2)
    assert (server.counts.accepted, server.counts.repeated) == (trainers * pushes, trainers * pushes // 2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"gradients": {"v": torch.zeros(2)}},
            r"Expected gradients for some of the parameters 'w', got one for 'v'",
        ),
        ({"gradients": {"w": torch.zeros(1, 2)}}, r"'w' must have shape \[2\], got \[1, 2\]"),
        ({"gradients": {"w": torch.zeros(2, dtype=torch.bool)}}, r"'w' must be an array of floats"),
        ({"version": -1}, r"version must be a number from 0 on, got -1"),
        ({"version": 0.5}, r"version must be a number from 0 on, got 0\.5"),
        ({"sequence": -1}, r"sequence must be a number from 0 on, got -1"),
        ({"lr": -0.1}, r"lr must be finite and not negative, got -0\.1"),
        ({"lr": float("nan")}, r"lr must be finite and not negative, got nan"),
    ],
)
def test_wrong_gradients_change_nothing(change, error):
    server = one_server(DenseSettings(grads_to_wait=2))
    push = {"gradients": {"w": torch.ones(2)}, "version": 0, "trainer": "a", "sequence": 0}
    with pytest.raises(ValueError, match=error):
        server.push_gradients(**{**push, **change})
    assert server.next_sequence("a") == 0
    assert server.state()["waiting"] == []


def test_a_server_without_a_model_says_so():
    server = DenseParameters()
    for call in (server.pull, server.state, server.flush, lambda: push(server, 1, 0)):
        with pytest.raises(RuntimeError, match="expected load_state first"):
            call()


def test_wrong_settings():
    for wrong, error in (
        (lambda: DenseSettings(grads_to_wait=0), "grads_to_wait must be at least 1, got 0"),
        (lambda: DenseSettings(grads_to_wait=1, tolerance=-1), "tolerance must not be negative, got -1"),
        (lambda: DenseParameters(window=0), "window must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=error):
            wrong()
