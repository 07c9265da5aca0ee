"""dense_reduce, average_every and find_unused_parameters over real processes, against plain torch."""

import copy

import communication_programs as programs
import numpy as np
import pytest
import torch
from cluster_helpers import serving
from communication_programs import OPTIMIZERS, USE_OTHER, TwoHeads, batch_of, batches_of, make
from ranks_helpers import run
from shared_results import shared_result

WORLDS = (2, 3)
RESUMED = {
    "powersgd": {"powersgd": {"rank": 1, "start_step": 2}},
    "bf16": {"dense_reduce": "bf16"},
    "average": {"average_every": 2},
    "unused": {"find_unused_parameters": True},
}
NAMES = {
    2: ["halves", "powers", "skips", "averages", "unused", "other ranks", "resumed", "loops"],
    3: ["halves", "powers", "skips", "averages"],
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Results by world, rank and program; each world is started once, as starting takes seconds."""

    def launch(folder):
        return {
            world: run(
                world,
                "communication_programs:everything",
                runs=str(folder),
                names=NAMES[world],
                options=RESUMED,
            )
            for world in WORLDS
        }

    return shared_result(tmp_path_factory, "dense_communication", launch)[1]


def results(launched, world, program):
    return [each[program] for each in launched[world]]


def mean_of(tensors):
    return torch.stack(list(tensors)).double().mean(0).float()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("net", ["small", "buckets"])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_in_16_bits_are_the_rounded_mean_of_rounded_gradients(launched, world, net, name, dtype):
    ranks = [each[net, name] for each in results(launched, world, "halves")]
    for step in range(2):
        for index in range(len(ranks[0]["names"])):
            total = torch.zeros(())
            for each in ranks:
                total = total + each["own"][step][index].to(dtype).float()
            expected = (total / world).to(dtype).float()
            for each in ranks:
                assert torch.equal(each["used"][step][index], expected)
            exact = mean_of(each["own"][step][index] for each in ranks)
            largest = max(float(each["own"][step][index].abs().max()) for each in ranks)
            torch.testing.assert_close(expected, exact, rtol=0, atol=0.01 * largest)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("net", ["exact", "buckets"])
def test_powersgd_of_the_gradients_rank_is_their_mean(launched, world, net):
    ranks = [each[net] for each in results(launched, world, "powers")]
    for index, name in enumerate(ranks[0]["names"]):
        expected = mean_of(each["own"][0][index] for each in ranks)
        scale = float(expected.abs().max())
        for each in ranks:
            torch.testing.assert_close(each["used"][0][index], expected, rtol=1e-4, atol=1e-4 * scale)
            assert torch.equal(each["used"][0][index], ranks[0]["used"][0][index])
        assert (name in ranks[0]["errors"]) == (name in ("first.weight", "second.weight"))


@pytest.mark.parametrize("world", WORLDS)
def test_powersgd_sends_sooner_or_later_all_of_every_gradient(launched, world):
    ranks = [each["feedback"] for each in results(launched, world, "powers")]
    compressed = False
    for index, name in enumerate(ranks[0]["names"]):
        due = sum(mean_of(each["own"][step][index] for each in ranks) for step in range(8))
        used = sum(ranks[0]["used"][step][index] for step in range(8))
        left = torch.zeros_like(used)
        if name in ranks[0]["errors"]:
            left = mean_of(each["errors"][name] for each in ranks)
            compressed |= float(left.abs().max()) > 1e-3 * float(due.abs().max())
            for step in range(8):
                assert torch.linalg.matrix_rank(ranks[0]["used"][step][index], rtol=1e-4) == 1
        torch.testing.assert_close(used + left, due, rtol=1e-4, atol=1e-5 * float(due.abs().max()))
    assert compressed


@pytest.mark.parametrize("world", WORLDS)
def test_powersgd_begins_after_its_first_steps(launched, world):
    ranks = [each["late"] for each in results(launched, world, "powers")]
    index = ranks[0]["names"].index("second.weight")
    for step in range(8):
        expected = mean_of(each["own"][step][index] for each in ranks)
        same = torch.allclose(ranks[0]["used"][step][index], expected, rtol=1e-4, atol=1e-7)
        assert same == (step < 5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["powersgd", "bf16", "average"])
def test_a_step_that_one_rank_must_skip_is_skipped_by_all_and_leaves_no_trace(launched, world, name):
    ranks = [each[name] for each in results(launched, world, "skips")]
    for count, steps, parameters in ranks:
        assert (count, steps) == (1, 6)
        for key, value in parameters.items():
            assert bool(torch.isfinite(value).all())
            assert torch.equal(value, ranks[0][2][key])


class Alone:
    """Ranks as plain loops of torch, one after the other, that are averaged now and then."""

    def __init__(self, world, optimizer, kind=None, **options):
        self.models = [copy.deepcopy(kind or make(**options)) for _ in range(world)]
        self.optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in self.models]

    def step(self, batches):
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            model.train()
            programs.loss(model(batch), batch).backward()
            optimizer.step()

    def average(self):
        states = [each.state_dict() for each in self.models]
        first = states[0]
        trained = {name for name, _ in self.models[0].named_parameters()}
        means = {
            name: mean_of(state[name] for state in states) if name in trained else value
            for name, value in first.items()
        }
        for model in self.models:
            model.load_state_dict(means)
        for index in range(len(list(self.models[0].parameters()))):
            slots = [
                optimizer.state[list(model.parameters())[index]]
                for model, optimizer in zip(self.models, self.optimizers, strict=True)
            ]
            having = [each for each in slots if each]
            for name in having[0] if having else ():
                value = having[0][name]
                if value is None:
                    continue
                mean = (
                    max(each[name] for each in having)
                    if name == "step"
                    else mean_of(each[name] for each in having)
                )
                for each in slots:
                    each[name] = mean.clone()

    def state(self):
        state = self.optimizers[0].state_dict()["state"]
        return {(i, n): v for i, slots in state.items() for n, v in slots.items() if v is not None}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=str(name))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_that_step_alone_are_averaged_every_so_many_steps_and_at_the_end(launched, world, optimizer):
    ranks = [each[optimizer] for each in results(launched, world, "averages")]
    alone = Alone(world, optimizer, norm=True)
    for step in range(5):
        alone.step([batch_of(rank, step) for rank in range(world)])
        if step in (1, 3):
            alone.average()
        for rank, (steps, _, _) in enumerate(ranks):
            assert_close(steps[step], alone.models[rank].state_dict())
        same = all(torch.equal(v, ranks[-1][0][step][n]) for n, v in ranks[0][0][step].items())
        assert same == (step in (1, 3))
    alone.average()
    for _, parameters, state in ranks:
        assert_close(parameters, alone.models[0].state_dict())
        assert_close(state, alone.state())
        assert all(torch.equal(value, ranks[0][1][name]) for name, value in parameters.items())
        assert all(torch.equal(value, ranks[0][2][name]) for name, value in state.items())


@pytest.mark.parametrize("world", WORLDS)
def test_evaluations_have_averaged_parameters_and_steps_count_from_there(launched, world):
    ranks = [each["evaluated"] for each in results(launched, world, "averages")]
    alone, evaluated = Alone(world, "adam"), []
    for step in range(1, 9):
        alone.step([batch_of(rank, step - 1) for rank in range(world)])
        for rank, (steps, _, _) in enumerate(ranks):
            assert_close(steps[step - 1], alone.models[rank].state_dict())
        if step in (3, 6, 8):
            alone.average()
            evaluated.append(copy.deepcopy(alone.models[0].state_dict()))
    for _, seen, _ in ranks:
        assert len(seen) == len(evaluated)
        for found, expected in zip(seen, evaluated, strict=True):
            assert_close(found, expected)
    with torch.no_grad():
        losses = [programs.loss(alone.models[0](batch), batch) for batch in batches_of(9, 2)]
    history = ranks[0][2]
    assert history["loss"][-1] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_gets_the_optimizer_state_of_a_head_that_took_part_elsewhere(launched, world):
    ranks = [each["heads"] for each in results(launched, world, "averages")]
    alone = Alone(world, "adam", make(TwoHeads))
    for step in range(3):
        alone.step([batch_of(rank, step, both=rank == 0) for rank in range(world)])
    assert len(alone.optimizers[1].state_dict()["state"]) < len(alone.optimizers[0].state_dict()["state"])
    alone.average()
    for parameters, state in ranks:
        assert_close(parameters, alone.models[0].state_dict())
        assert_close(state, alone.state())


@pytest.mark.parametrize("world", WORLDS)
def test_loops_of_ranks_that_step_alone_end_with_the_mean(launched, world):
    alone = Alone(world, "adam")
    for step in range(5):
        alone.step([batch_of(rank, step) for rank in range(world)])
        if step in (1, 3, 4):
            alone.average()
    for each in results(launched, world, "averages"):
        assert_close(each["context"], alone.models[0].state_dict())


@pytest.mark.parametrize("passes", [1, 2])
def test_a_head_may_take_no_part_in_a_batch(launched, passes):
    model = make(TwoHeads)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for step in range(0, 4, passes):
        sums = {}
        for number in range(step, step + passes):
            for rank in range(2):
                batch = batch_of(rank, number, both=USE_OTHER[number][rank])
                copied = copy.deepcopy(model)
                copied.zero_grad()
                programs.loss(copied(batch), batch).backward()
                for name, each in copied.named_parameters():
                    if each.grad is not None:
                        sums[name] = sums.get(name, 0) + each.grad / (2 * passes)
        for name, each in model.named_parameters():
            each.grad = sums.get(name)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    expected = {(i, n): v for i, slots in state.items() for n, v in slots.items()}
    for each in results(launched, 2, "unused"):
        parameters, found = each[passes]
        assert_close(parameters, model.state_dict())
        assert_close(found, expected)


@pytest.mark.parametrize("name", RESUMED)
def test_a_fit_that_resumes_has_the_bits_of_one_that_was_never_stopped(launched, name):
    for each in results(launched, 2, "resumed"):
        straight, stopped = each[name, "straight"], each[name, "stopped"]
        for one, other in ((straight[0], stopped[0]), (straight[2], stopped[2])):
            assert one.keys() == other.keys()
            assert [key for key in one if not torch.equal(one[key], other[key])] == []
        for left, right in zip(straight[1], stopped[1], strict=True):
            np.testing.assert_array_equal(left, right)
        errors, others = (run[3].get("errors", {}) for run in (straight, stopped))
        assert errors.keys() == others.keys()
        assert all(torch.equal(errors[key], others[key]) for key in errors)
        assert bool(errors) == (name == "powersgd")
        assert all(bool(error.any()) for error in errors.values())


def test_a_loop_that_resumes_has_the_bits_of_one_that_was_never_stopped(launched):
    for each in results(launched, 2, "loops"):
        straight, stopped = each["straight"], each["stopped"]
        assert [name for name in straight if not torch.equal(straight[name], stopped[name])] == []


def test_what_was_not_sent_is_divided_when_the_number_of_ranks_changes(launched):
    for errors, state, no_errors, no_state in results(launched, 2, "other ranks"):
        assert torch.equal(errors["errors"]["first.weight"], torch.full((20, 24), 3.0))
        assert state["steps"] == 4
        assert (no_errors["errors"], no_state["steps"]) == ({}, 0)


def test_rows_on_servers_learn_with_dense_gradients_in_16_bits_and_with_steps_alone():
    given = [{}, {"dense_reduce": "bf16"}, {"dense_reduce": "powersgd"}, {"average_every": 3}]
    with serving(1) as addresses:
        one, other = run(2, "communication_programs:hybrid", servers=addresses, given=given)
    for (parameters, _, evaluation), (others, _, same) in zip(one, other, strict=True):
        assert all(torch.equal(value, others[name]) for name, value in parameters.items())
        assert evaluation == same
        assert evaluation["loss"] < 0.05 * one[0][1][0]
