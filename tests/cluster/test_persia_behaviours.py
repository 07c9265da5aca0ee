"""The numbered behaviours of PERSIA, through processes and sockets.

The same numbers stand in tests/embedding/test_behaviours.py, for rows in memory. What is expected here comes
from the references' own numbers or from plain Python (`slow_rows.py`, `reference.py`). PERSIA's 15 is in
tests/test_examples.py and test_hybrid_auc.py.
"""

import itertools
import os
import shutil
import sys
from statistics import NormalDist

import kinds_program
import pytest
import reference as ref
import torch
from forked_programs import ForkedProgram
from reference_helpers import (
    MOVES,
    WAYS,
    Scaled,
    check_layout,
    first,
    ids,
    keys_of,
    on_all,
    values_of,
    visits,
)
from slow_rows import first_vector, owner_of

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.embedding import HashStack
from karvan.ragged import REFERENCE


@pytest.fixture(scope="module")
def loader(clusters):
    """A loader's process beside two servers and a worker; it sends what kinds_program.py says."""
    given = {
        "KARVAN_REGISTRY": clusters[2].registry.address,
        "KARVAN_PARAMETER_SERVER_COUNT": "2",
        "KARVAN_EMBEDDING_WORKER_COUNT": "1",
        "KARVAN_INDEX": "0",
        "KARVAN_COUNT": "1",
    }
    process = ForkedProgram([sys.executable, kinds_program.__file__], env={**os.environ, **given})
    clusters[2].directory.find("loader", 0)
    yield process
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize("way", WAYS)
def test_persia_1_rows_that_do_not_fit_and_labels_that_are_missing_are_named(job, loader, way):
    # Karvan's batches have no flag requires_grad and no largest size: what needs a label says so, and a batch
    # above 65,535 rows is one like any other.
    job(2, way)
    context, stream = visits(way)
    _, refused, many = stream
    assert refused.meta == {
        "refused": "A batch needs equal rows, but feature 'visitors' has 2 and feature 'price' has 3."
    }
    assert many.samples == kinds_program.MANY
    with context as ctx, pytest.raises(KeyError, match="no label 'label' in the batch, which has: "):
        ctx.forward(many)
    loss = kv.losses.BinaryCrossEntropy()
    optimizers = {"sparse_optimizer": ctx.sparse_optimizer, "dense_optimizer": ctx.dense_optimizer}
    trainer = kv.Trainer(ctx.model, loss, **optimizers, progress="none")
    with pytest.raises(KeyError, match="no column 'label' in the batch, which has: "):
        trainer.fit([many])
    assert ctx.model.embeddings.table("visitors").rows == kinds_program.MANY
    stream.close()


@pytest.mark.parametrize("way", WAYS)
def test_persia_2_dense_labels_of_8_dtypes_and_meta_arrive_exactly(job, loader, way):
    job(2, way)
    _, stream = visits(way)
    batch = next(iter(stream))
    expected = {**kinds_program.labels(), **kinds_program.dense()}
    assert len(kinds_program.EDGES) == 8
    assert set(batch) == {*expected, REFERENCE if way == "worker" else "visitors"}
    for name, sent in expected.items():
        assert (batch[name].dtype, batch[name].shape) == (sent.dtype, sent.shape)
        assert batch[name].numpy().tobytes() == sent.numpy().tobytes()  # every bit, of a NaN too
    assert batch.meta == kinds_program.META
    stream.close()


@on_all
def test_persia_3_outputs_keep_the_order_of_features_and_empty_samples_are_zero(job, servers, way):
    # PERSIA's tensors come in the batch's order. Karvan's come by name, in the engine's order whatever the
    # batch's is.
    send = job(servers, way)
    names = ["visitors", "products", "features"]
    engine = kv.EmbeddingEngine({name: kv.Table(dim) for dim, name in enumerate(names, 2)})
    rows = [[5, -1, 5], [], [2**62, 7]]
    for order in itertools.permutations(names):
        out = engine(send({name: kv.Ragged.from_lists(rows) for name in order}))
        assert [name for name in out if name in names] == names
        for dim, name in enumerate(names, 2):
            expected = torch.stack(
                [first(name, row, dim).sum(0) if row else torch.zeros(dim) for row in rows]
            )
            assert out[name].shape == (3, dim)
            assert not out[name][1].any()
            torch.testing.assert_close(out[name], expected)
    check_layout(job(servers, way), rows)


@on_all
def test_persia_4_a_raw_slot_has_a_fixed_size_and_a_mask_and_drops_excess_ids(job, servers, way):
    rows = [[11, 12, 13, 14], [], [15], [12, 16]]
    values, mask = check_layout(job(servers, way), rows, combiner="sequence", length=2)
    assert values.shape == (4, 2, 4)
    assert mask.tolist() == [[True, True], [False, False], [True, False], [True, True]]
    assert not values[~mask].any()
    # Keys 13 and 14 are nowhere: `check_layout` has compared the table's keys.


@on_all
def test_persia_5_sqrt_scaling_divides_the_sum_and_the_gradient(job, servers, way):
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"products": kv.Table(2, combiner="sqrtn")})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    out = engine(send({"products": kv.Ragged.from_lists([[1, 2, 3, 4], [9]])}))["products"]
    begin = first("products", [1, 2, 3, 4, 9], 2)
    torch.testing.assert_close(out, torch.stack([begin[:4].sum(0) / 2, begin[4]]))
    out.sum().backward()
    optimizer.step()
    moved = begin - engine.table("products").vectors([1, 2, 3, 4, 9])
    torch.testing.assert_close(moved, ids(1, 1, 1, 1, 2)[:, None].expand(5, 2) / 2)
    check_layout(job(servers, way), [[1, 2, 3], [], [2], [1, 1, 4, 5, 6]], combiner="sqrtn")


@on_all
def test_persia_6_prefixed_ids_have_rows_of_their_own(job, servers, way):
    send = job(servers, way)
    given = ids(16000000000000000, 3)
    engine = kv.EmbeddingEngine({"a": kv.Table(4, name="products"), "b": kv.Table(4, name="products")})
    out = engine(send({"a": kv.ids.prefix(given, 99, 12), "b": kv.ids.prefix(given, 98, 12)}))
    by_group = [
        [key % (2**52 - 1) + prefix for key in given.tolist()]
        for prefix in (450359962737049600, 450359962737049600 - 2**52)
    ]
    assert by_group[0][0] == 452849163854938115
    assert keys_of(engine.table("products")) == sorted(itertools.chain(*by_group))
    assert torch.equal(out["a"], first("products", by_group[0], 4))
    assert torch.equal(out["b"], first("products", by_group[1], 4))


@on_all
def test_persia_7_a_hash_stack_sums_the_rows_of_its_buckets(job, servers, way):
    golden = {12: [2, 18], 23: [5, 10], 34: [0, 11], 56: [6, 17], 78: [7, 12], 90: [8, 16]}
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"products": kv.Table(4, hash_stack=HashStack(2, 10))})
    handle = engine.table("products")
    for key, buckets in golden.items():
        out = engine(send({"products": ids(key)}))["products"]
        assert keys_of(handle) == buckets
        torch.testing.assert_close(out[0], first("products", buckets, 4).sum(0))
        handle.clear()
    # Several ids of a sample, and buckets that meet; raw slots too, where PERSIA overwrites and does not sum.
    rows = [[12, 23], [], [34, 56, 78, 90], [12, 12]]
    check_layout(job(servers, way), rows, stack=(2, 10))
    check_layout(job(servers, way), rows, stack=(2, 10), combiner="sequence", length=3)


@on_all
def test_persia_8_slots_share_vectors_only_within_a_group(job, servers, way):
    # A feature group is a table that several features name.
    send = job(servers, way)
    names = {"a": "products", "b": "products", "c": "visitors"}
    tables = {feature: kv.Table(4, name=name) for feature, name in names.items()}
    engine = kv.EmbeddingEngine(tables)
    optimizer = kv.optim.SGD(engine, lr=1.0)
    keys = list(range(8))
    out = engine(send(dict.fromkeys("abc", ids(*keys))))
    begin = {name: first(table.name, keys, 4) for name, table in tables.items()}
    assert all(torch.equal(out[name], begin[name]) for name in "abc")
    (out["a"].sum() + 2 * out["b"].sum()).backward()
    optimizer.step()
    engine.eval()
    after = engine(send(dict.fromkeys("abc", ids(*keys))))
    torch.testing.assert_close(after["a"], begin["a"] - 3)
    assert torch.equal(after["b"], after["a"])
    assert torch.equal(after["c"], begin["c"])
    assert [handle.rows for handle in engine.tables()] == [8, 8]


@on_all
def test_persia_9_an_id_begins_with_the_same_vector_on_any_number_of_servers(job, servers, way):
    keys = [0, 1, -1, 2**63 - 1, -(2**63), *range(100, 140)]
    assert {owner_of(key, servers) for key in keys} == set(range(servers))
    tables = {
        "products": kv.Table(5, init=kv.init.Uniform(-0.3, 0.7)),
        "visitors": kv.Table(5, init=kv.init.Normal(0.0, 1.0)),
    }
    for order in (keys, keys[::-1]):  # and in any run: the second one has empty tables again
        send = job(servers, way)
        engine = kv.EmbeddingEngine(tables, seed=11)
        assert engine.table("products").rows == 0
        for some in (order[:7], order):
            engine(send(dict.fromkeys(tables, ids(*some))))
        assert torch.equal(
            engine.table("products").vectors(keys), first("products", keys, 5, seed=11, low=-0.3, high=0.7)
        )
        # The quantile of the same draw: (x + 0.5) / 2^32, of which 24 bits are in a uniform one.
        drawn = first("visitors", keys, 5, seed=11, low=0.0, high=1.0).double()
        low = [NormalDist().inv_cdf(max(u, 2**-33)) for u in drawn.flatten().tolist()]
        high = [NormalDist().inv_cdf(u + 2**-24) for u in drawn.flatten().tolist()]
        received = engine.table("visitors").vectors(keys).flatten().tolist()
        assert all(a - 1e-6 <= b <= c + 1e-6 for a, b, c in zip(low, received, high, strict=True))


@on_all
def test_persia_10_evaluation_and_admission_of_none_insert_nothing(job, servers, way):
    send = job(servers, way)
    engine = kv.EmbeddingEngine(
        {"products": kv.Table(3), "visitors": kv.Table(3, admit=kv.admission.Probability(0.0))}
    )
    known, unseen = list(range(10)), list(range(1000, 1030))
    for _ in range(2):
        out = engine(send(dict.fromkeys(("products", "visitors"), ids(*known))))
        assert torch.equal(out["products"], first("products", known, 3))
        assert not out["visitors"].any()
    for evaluating in (True, False):
        engine.train(not evaluating)
        with torch.set_grad_enabled(evaluating):  # either is enough
            out = engine(send(dict.fromkeys(("products", "visitors"), ids(*known, *unseen))))
        assert torch.equal(out["products"][:10], first("products", known, 3))
        assert not out["products"][10:].any()
        assert not out["visitors"].any()
    assert [handle.rows for handle in engine.tables()] == [10, 0]
    assert engine.table("visitors").stats()["rejected"] == 20


@on_all
def test_persia_10_an_id_without_a_row_shifts_no_other_ones_gradient(job, servers, way):
    # A defect of PERSIA: after an id that was not admitted, gradients went to the wrong rows.
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"products": kv.Table(2, admit=kv.admission.Probability(0.5))})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    keys = list(range(60))
    torch.autograd.backward(
        engine(send({"products": ids(*keys)}))["products"], torch.arange(60.0)[:, None].expand(60, 2)
    )
    optimizer.step()
    kept = keys_of(engine.table("products"))
    assert 15 < len(kept) < 45
    moved = first("products", kept, 2) - engine.table("products").vectors(kept)
    torch.testing.assert_close(moved, torch.tensor(kept)[:, None].expand(-1, 2).float())


@on_all
def test_persia_11_lru_keeps_5_of_0_to_9_and_then_evicts_6_not_5(job, servers, way):
    # Capacity is PERSIA's, of each server: a table's is shared out, so this one has five rows on each.
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"products": kv.Table(2, evict=kv.eviction.LRU(5 * servers))})
    handle = engine.table("products")
    of_server = [[key for key in range(400) if owner_of(key, servers) == s][:11] for s in range(servers)]

    def use(*places):
        for place in places:
            engine(send({"products": ids(*(keys[place] for keys in of_server))}))

    def kept(*places):
        return keys_of(handle) == sorted(keys[place] for keys in of_server for place in places)

    use(*range(10))
    assert handle.rows == 5 * servers
    assert kept(5, 6, 7, 8, 9)
    use(5, 10)
    assert kept(5, 7, 8, 9, 10)
    assert handle.stats()["evicted"] == 6 * servers


@on_all
def test_persia_12_a_bad_gradient_skips_its_slot_only_and_is_counted(job, servers, way):
    send = job(servers, way)
    init = kv.init.Constant(0.5)
    engine = kv.EmbeddingEngine({"a": kv.Table(2, init=init), "b": kv.Table(2, init=init)})
    optimizer = kv.optim.Adagrad(engine, lr=0.25)
    keys = list(range(16))
    for bad in (torch.nan, torch.inf):
        out = engine(send({"a": ids(*keys), "b": ids(*keys)}))
        gradient = torch.ones(16, 2)
        gradient[3, 1] = bad
        torch.autograd.backward([out["a"], out["b"]], [gradient, torch.ones(16, 2)])
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(engine.table("a").vectors(keys), torch.full((16, 2), 0.5))
    assert not engine.table("a").snapshot().state.any()
    after = 0.5 - 0.25 / 1**0.5 - 0.25 / 2**0.5  # Adagrad's sum of squares was 1, then 2
    torch.testing.assert_close(engine.table("b").vectors(keys), torch.full((16, 2), after))
    assert [engine.table(name).stats()["skipped_updates"] for name in "ab"] == [2, 0]


@on_all
def test_persia_12_a_sum_that_overflows_damages_no_row_and_is_counted(job, servers, way):
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"a": kv.Table(2, init=kv.init.Constant(0.5))})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    keys = list(range(16))
    out = engine(send({"a": ids(*keys, 3)}))["a"]
    gradient = torch.ones(17, 2)
    gradient[[3, 16]] = 3e38  # finite each, and infinite together
    torch.autograd.backward(out, gradient)
    optimizer.step()
    # A trainer sees it in its own sums, and all servers leave the step out. Sums of a worker are seen by the
    # server that has the row, which leaves out its share.
    owner = owner_of(3, servers)
    kept = [key for key in keys if way == "trainer" or owner_of(key, servers) == owner]
    expected = {key: [0.5, 0.5] if key in kept else [-0.5, -0.5] for key in keys}
    assert values_of(engine.table("a"), keys) == expected
    assert engine.table("a").stats()["skipped_updates"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_persia_12_a_training_loop_leaves_out_the_whole_step_and_counts_it(job, way):
    # Stricter than PERSIA on purpose, which applied embeddings of a step whose dense part was left out.
    send = job(2, way)
    model = Scaled()
    context = kv.TrainContext(
        model,
        sparse_optimizer=kv.optim.SGD(lr=1.0),
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        label=None,
    )
    good, bad = ({"a": ids(1, 2), "b": ids(1, 2), "scale": torch.tensor([1.0, x])} for x in (1.0, torch.nan))
    with context as ctx:
        for batch, taken in ((good, True), (bad, False), (good, True)):
            output, _ = ctx.forward(send(batch, ["a", "b"]))
            assert ctx.backward(output.sum()) is taken
        assert (ctx.step, ctx.skipped) == (3, 1)
    for name in "ab":
        assert values_of(model.embeddings.table(name), [1, 2]) == {1: [-1.5], 2: [-1.5]}
    assert model.bias.item() == -4.0


@on_all
def test_persia_12_values_stay_within_the_weight_bound(job, servers, way):
    send = job(servers, way)
    engine = kv.EmbeddingEngine({"products": kv.Table(2)})
    optimizer = kv.optim.SGD(engine, lr=1.0, weight_bound=0.75)
    keys = list(range(16))
    for sign in (1.0, -1.0):
        (engine(send({"products": ids(*keys)}))["products"] * (100 * sign)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(engine.table("products").vectors(keys), torch.full((16, 2), -0.75 * sign))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bound", [1, 4])
def test_persia_13_no_more_batches_are_out_than_staleness_allows(job, bound, way):
    send = job(2, way, staleness=bound)
    engine = kv.EmbeddingEngine({"f": kv.Table(1, init=kv.init.Constant(0.0))})
    engine.hold_prepared(bound + 2)
    optimizer = kv.optim.SGD(engine, lr=1.0)
    given = [send({"f": torch.arange(16)}) for _ in range(32)]
    ahead = iter(given)
    for batch in itertools.islice(ahead, bound + 1):
        engine.prepare(batch, training=True)
    out = []
    for number, batch in enumerate(given):
        seen = engine(batch)["f"]
        # Each gradient takes 1 off every row, so a row tells how many had been applied when it was read.
        out.append(number + 1 + int(seen.max()))
        seen.sum().backward()
        optimizer.step()
        if (following := next(ahead, None)) is not None:
            engine.prepare(following, training=True)
    assert min(2, bound) <= max(out) <= bound
    assert max(out) <= engine.store.window.most <= bound
    assert engine.table("f").vectors(torch.arange(16)).tolist() == [[-32.0]] * 16


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_persia_14_what_n_servers_saved_m_servers_load(job, tmp_path, before, after):
    slow = ref.ReferenceTable(
        4, ref.Adagrad(lr=0.1), lambda key: torch.from_numpy(first_vector("products", key, 4))
    )

    def begin(servers):
        job(servers)
        engine = kv.EmbeddingEngine({"products": kv.Table(4)})
        return engine, kv.optim.Adagrad(engine, lr=0.1)

    def train(engine, optimizer):
        rows = [[key] for key in torch.randint(-40, 40, (24,)).tolist()]
        lookup = ref.look_up(ref.Feature(4), rows)
        out = engine({"products": ids(*itertools.chain(*rows))})["products"]
        slow.see(lookup.occurrences, engine.step)
        gradient = torch.randn(24, 4)
        torch.autograd.backward(out, gradient)
        optimizer.step()
        slow.apply(lookup.backward(gradient))

    engine, optimizer = begin(before)
    for _ in range(3):
        train(engine, optimizer)
    ref.check_table(engine.table("products"), slow)
    state = {"engine": engine.state_dict(), "optimizer": optimizer.state_dict()}
    kv.Checkpoints(tmp_path).save(3, state, engine).wait()
    engine, optimizer = begin(after)
    assert engine.table("products").rows == 0
    saved = kv.Checkpoints(tmp_path).latest().load(engine)
    engine.load_state_dict(saved["engine"])
    optimizer.load_state_dict(saved["optimizer"])
    ref.check_table(engine.table("products"), slow)  # vectors, states, counts and steps, bit for bit
    train(engine, optimizer)
    ref.check_table(engine.table("products"), slow)


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_persia_14_an_unfinished_or_damaged_checkpoint_is_an_error(job, tmp_path, before, after):
    job(before)
    engine = kv.EmbeddingEngine({"products": kv.Table(4)})
    engine({"products": torch.arange(200)})
    kv.Checkpoints(tmp_path / "whole").save(1, {}, engine).wait()
    job(after)
    engine = kv.EmbeddingEngine({"products": kv.Table(4)})
    engine({"products": ids(7, 5000)})

    def copy(name):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name) / "step-000000000001"
        return folder, next(folder.glob("tables/products/*part-*"))

    def load(name):
        kv.Checkpoints(tmp_path / name).latest().load(engine)

    folder, _ = copy("without its mark")  # the manifest is written last
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        kv.checkpoint.find(folder)
    _, part = copy("without a part")
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        load("without a part")
    _, part = copy("a bit that fell over")
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=part.name):
        load("a bit that fell over")
    folder, _ = copy("still being written")
    folder.rename(folder.with_name(f".{folder.name}.tmp-1-0"))
    assert kv.Checkpoints(tmp_path / "still being written").latest() is None
    assert values_of(engine.table("products"), [7, 5000, 8]) == {
        **{key: first_vector("products", key, 4).tolist() for key in (7, 5000)},
        8: [0.0] * 4,
    }
    load("whole")
    assert keys_of(engine.table("products")) == list(range(200))
