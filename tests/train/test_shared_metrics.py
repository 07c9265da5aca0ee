"""Metrics that all trainers of a round count: those of their batches, in the order of the step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.distributed import CollectiveChannel
from karvan.train.group_steps import SharedMetrics

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def metrics():
    return {
        "auc": kv.metrics.AUC(weight="weight"),
        "error": kv.metrics.MeanSquaredError(),
        "mean": kv.metrics.Mean(),  # has an `update` of its own
    }


def batch_of(size, random):
    rand = torch.rand(3, size, generator=random)
    return rand[0], {"label": rand[1].round(), "weight": rand[2]}


@given(st.lists(SIZES, max_size=3), st.randoms(use_true_random=False))
def test_they_are_those_of_batches_counted_in_order(steps, order):
    random = torch.Generator().manual_seed(0)
    expected, shared = metrics(), metrics()
    counting = SharedMetrics(shared)
    for sizes in steps:
        batches = [batch_of(size, random) for size in sizes]
        for output, batch in batches:
            for metric in expected.values():
                metric.update(output, batch)
        places = list(range(len(batches)))
        order.shuffle(places)  # in which order they are computed
        for place in places:
            counting.read(place + 10, *batches[place])
        mine = [(place, place + 10) for place in places]
        for _ in range(order.randint(1, 2)):  # a step that has to be agreed on again is counted once
            counting.share(CollectiveChannel("group"), mine)
        for output, batch in batches:  # what was read is a copy
            output.zero_()
            batch["label"].zero_()
        counting.count()
        counting.count()  # there is nothing left
    for name, metric in expected.items():
        for key, value in metric.state().items():
            assert torch.equal(value, shared[name].state()[key]) or name == "mean"
        torch.testing.assert_close(metric.compute(), shared[name].compute(), equal_nan=True)


def test_batches_of_a_step_that_nobody_commits_are_forgotten():
    shared = metrics()
    counting = SharedMetrics(shared)
    counting.read(0, *batch_of(4, torch.Generator()))
    counting.share(CollectiveChannel("group"), [(0, 0)])
    counting.forget()
    counting.count()
    assert all(torch.equal(each, torch.zeros_like(each)) for each in shared["error"].state().values())


def test_a_metric_that_cannot_be_merged_is_an_error_before_training():
    class Own:
        def update(self, output, batch):
            pass

    with pytest.raises(TypeError, match=r"Own has no merge\(state\): a metric needs it"):
        SharedMetrics({"own": Own()})
