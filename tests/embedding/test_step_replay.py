"""A step that is computed again: the same vectors, and rows that see it once."""

import numpy as np
import torch

import karvan as kv


def _engine():
    engine = kv.EmbeddingEngine(
        {"user": kv.Table(4, admit=kv.admission.MinCount(2)), "item": kv.Table(3, combiner="mean")}, seed=3
    )
    return engine, kv.optim.Adagrad(engine, lr=0.1)


def _batches():
    item = kv.Ragged.from_lists([[1, 2], [], [2]])
    return [{"user": torch.tensor(users), "item": item} for users in ([1, 2, 1], [2, 5, 5])]


def _backward(outputs, factor):
    (factor * (outputs["user"].square().sum() + outputs["item"].sum())).backward()


def test_a_step_of_several_passes_that_is_computed_again_counts_once():
    (engine, sparse), (plain, expected) = _engine(), _engine()
    for _ in range(3):
        for batch in _batches():
            _backward(plain(batch), 1.0)
        expected.step()

        engine.replay.record()
        given = []
        for batch in _batches():
            outputs = engine(batch)
            given.append({name: outputs[name].detach().clone() for name in ("user", "item")})
            _backward(outputs, 7.0)
            with torch.no_grad():
                outputs["user"].zero_()  # what a model does to its own copy
        for _ in range(2):
            sparse.zero_grad()
            engine.replay.replay()
            for batch, first in zip(_batches(), given, strict=True):
                outputs = engine(batch)
                assert all(torch.equal(outputs[name], first[name]) for name in first)
                _backward(outputs, 1.0)
        sparse.step()
        engine.replay.end()
    assert engine.step == plain.step == 6
    for table in ("user", "item"):
        for received, wanted in zip(
            engine.table(table).snapshot(), plain.table(table).snapshot(), strict=True
        ):
            np.testing.assert_array_equal(received, wanted)


def test_evaluations_and_steps_after_the_end_are_looked_up():
    engine, _ = _engine()
    batch = _batches()[0]
    engine.replay.record()
    engine(batch)
    engine.replay.replay()
    with torch.no_grad():
        engine(batch)
    engine.replay.end()
    engine(batch)
    assert engine.step == 2
