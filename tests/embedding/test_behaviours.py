"""The numbered behaviours of the reference systems (shared/reference), one test each."""

import pytest
import reference as ref
import torch
from embedding_helpers import ids, keys_of, one, train

import karvan as kv
from karvan.embedding import HashStack

# PERSIA


def test_persia_3_outputs_come_in_the_engines_order_and_empty_rows_are_zero():
    engine = kv.EmbeddingEngine({"b": kv.Table(3), "a": kv.Table(2)})
    out = engine({"a": kv.Ragged.from_lists([[1], [], [2, 3]]), "b": ids(1, 2, 3)})
    assert list(out) == ["b", "a"]
    assert out["b"].shape == (3, 3)
    assert out["a"].shape == (3, 2)
    assert torch.equal(out["a"][1], torch.zeros(2))
    assert out["a"][0].any()


def test_persia_4_sequence_is_padded_with_a_mask_and_drops_excess_ids():
    engine, handle = one(combiner="sequence", length=2)
    values, mask = engine({"f": kv.Ragged.from_lists([[1, 2, 3], [], [4]])})["f"]
    assert values.shape == (3, 2, 2)
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert torch.equal(values[0], handle.vectors(ids(1, 2)))
    assert not values[~mask].any()
    assert keys_of(handle) == [1, 2, 4]


def test_persia_5_sqrtn_scales_forward_and_gradient():
    engine, handle = one(combiner="sqrtn")
    opt = kv.optim.SGD(engine, lr=1.0)
    out = engine({"f": kv.Ragged.from_lists([[1, 2, 3, 4]])})["f"]
    before = handle.vectors(ids(1, 2, 3, 4))
    torch.testing.assert_close(out[0], before.sum(0) / 2)
    out.sum().backward()
    opt.step()
    torch.testing.assert_close(handle.vectors(ids(1, 2, 3, 4)), before - 0.5)


def test_persia_7_hash_stack_goldens():
    engine, handle = one(hash_stack=HashStack(rounds=2, size=10))
    golden = {12: [2, 18], 23: [5, 10], 34: [0, 11], 56: [6, 17], 78: [7, 12], 90: [8, 16]}
    for key, rows in golden.items():
        handle.clear()
        out = engine({"f": ids(key)})["f"]
        assert keys_of(handle) == rows
        torch.testing.assert_close(out[0], handle.vectors(ids(*rows)).sum(0))


def test_persia_8_features_share_vectors_exactly_when_they_name_the_same_table():
    tables = {"a": kv.Table(4), "b": kv.Table(4, name="a"), "c": kv.Table(4)}
    engine = kv.EmbeddingEngine(tables)
    out = engine({name: ids(5) for name in tables})
    assert torch.equal(out["a"], out["b"])
    assert not torch.equal(out["a"], out["c"])
    train(engine, kv.optim.SGD(engine, lr=1.0), b=ids(5), a=ids(5), c=ids(6))
    with torch.no_grad():
        after = engine({name: ids(5) for name in tables})
    torch.testing.assert_close(after["a"], out["a"].detach() - 2)
    assert torch.equal(after["a"], after["b"])
    assert torch.equal(after["c"], out["c"])


INITS = {
    "constant": kv.init.Constant(0.5),
    "uniform": kv.init.Uniform(-0.1, 0.1),
    "normal": kv.init.Normal(0.0, 1.0),
    "truncated": kv.init.TruncatedNormal(0.0, 1.0, -2.0, 2.0),
    "xavier_uniform": kv.init.XavierUniform(1.0),
    "xavier_normal": kv.init.XavierNormal(1.0),
    "kaiming_uniform": kv.init.KaimingUniform(1.0),
    "kaiming_normal": kv.init.KaimingNormal(1.0),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_persia_9_a_new_vector_depends_on_seed_table_and_key_only(init):
    def vectors(order, *, seed=1, shards=1, name="f"):
        engine = kv.EmbeddingEngine({name: kv.Table(6, init=init)}, seed=seed, shards=shards)
        for part in order:
            engine({name: part})
        return engine.table(name).vectors(ids(1, -1, 2**63 - 1))

    first = vectors([ids(1, -1, 2**63 - 1)])
    assert torch.equal(vectors([ids(9, 2**63 - 1), ids(-1, 7), ids(1, 1)], shards=16), first)
    assert first.isfinite().all()
    if not isinstance(init, kv.init.Constant):
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(vectors([ids(1, -1, 2**63 - 1)], seed=2), first)
        assert not torch.equal(vectors([ids(1, -1, 2**63 - 1)], name="g"), first)


def test_persia_10_evaluation_and_probability_zero_insert_nothing():
    engine, handle = one()
    engine({"f": ids(1)})
    engine.eval()
    out = engine({"f": ids(1, 2)})["f"]
    assert out[0].any()
    assert not out[1].any()
    assert handle.rows == 1
    engine, handle = one(admit=kv.admission.Probability(0.0))
    assert not engine({"f": ids(1, 2)})["f"].any()
    assert handle.rows == 0
    assert handle.stats()["rejected"] == 2


def test_persia_11_lru_keeps_the_rows_used_last():
    engine, handle = one(evict=kv.eviction.LRU(capacity=5))
    for key in range(10):
        engine({"f": ids(key)})
        handle.evict()
    assert keys_of(handle) == [5, 6, 7, 8, 9]
    engine({"f": ids(5)})
    engine({"f": ids(10)})
    handle.evict()
    assert keys_of(handle) == [5, 7, 8, 9, 10]
    assert handle.stats()["evicted"] == 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_persia_12_a_bad_gradient_skips_its_table_only_and_is_counted(bad):
    engine = kv.EmbeddingEngine({"a": kv.Table(2), "b": kv.Table(2)})
    opt = kv.optim.Adagrad(engine, lr=0.1)
    train(engine, opt, a=ids(1, 2, 3), b=ids(1, 1, 1))
    before = ref.sort_rows(engine.table("a").snapshot())
    other = engine.table("b").vectors(ids(1))
    out = engine({"a": ids(1, 2), "b": ids(1, 1)})
    (out["a"] * torch.tensor([[1.0, 1.0], [bad, 1.0]])).sum().add(out["b"].sum()).backward()
    opt.step()
    after = ref.sort_rows(engine.table("a").snapshot())
    assert torch.equal(after["vectors"], before["vectors"])
    assert torch.equal(after["state"], before["state"])
    assert not torch.equal(engine.table("b").vectors(ids(1)), other)
    assert [engine.table(name).stats()["skipped_updates"] for name in "ab"] == [1, 0]


def test_persia_12_values_stay_within_the_weight_bound():
    engine, handle = one()
    opt = kv.optim.SGD(engine, lr=1.0, weight_bound=0.75)
    for gradient in (100.0, -100.0):
        train(engine, opt, gradient, f=ids(1))
        assert torch.equal(handle.vectors(ids(1)).abs(), torch.full((1, 2), 0.75))


# RecIS


def test_recis_9_training_inserts_and_read_only_does_not():
    engine, handle = one()
    engine({"f": ids(1, 2)})
    rows = handle.snapshot()
    engine, handle = one(admit=kv.admission.ReadOnly())
    handle.load(rows)
    out = engine({"f": ids(1, 3)})["f"]
    assert torch.equal(out[0], handle.vectors(ids(1))[0])
    assert not out[1].any()
    assert keys_of(handle) == [1, 2]
    out.sum().backward()
    kv.optim.SGD(engine, lr=0.1).step()
    assert keys_of(handle) == [1, 2]
    assert handle.stats()["rejected"] == 1
    assert handle.stats()["dropped_gradients"] == 0


def test_recis_10_sum_mean_and_tile():
    rows = kv.Ragged.from_lists([[1, 2], [], [1]], weights=[[1.0, 2.5], [], [3.0]])

    def pooled(combiner, **options):
        engine, handle = one(1, combiner=combiner, init=kv.init.Constant(1.0), **options)
        engine({"f": rows})
        snapshot = handle.snapshot()
        snapshot.vectors[snapshot.keys.tolist().index(1)] = 1.5
        handle.load(snapshot)
        return engine({"f": rows})["f"].tolist(), engine({"f": kv.Ragged(rows.values, rows.offsets)})["f"]

    assert pooled("sum")[0] == [[4.0], [0.0], [4.5]]
    assert pooled("mean")[0] == [[pytest.approx(4 / 3.5)], [0.0], [1.5]]
    assert pooled("tile", length=3)[1].tolist() == [[1.5, 1.0, 0.0], [0.0] * 3, [1.5, 0.0, 0.0]]


def test_recis_11_a_shared_name_needs_one_dim_and_one_initialiser():
    for other in (kv.Table(8, name="a"), kv.Table(4, name="a", init=kv.init.Constant(0.0))):
        with pytest.raises(ValueError, match=r"'a'.*'b'"):
            kv.EmbeddingEngine({"a": kv.Table(4), "b": other})


def test_recis_12_repeated_and_accumulated_rows_are_summed_before_the_update():
    engine, handle = one(init=kv.init.Constant(0.0))
    opt = kv.optim.Adagrad(engine, lr=1.0)
    engine({"f": ids(1, 1, 2)})["f"].sum().backward()
    engine({"f": ids(2, 1, 3)})["f"].sum().backward()
    opt.step()
    rows = ref.sort_rows(handle.snapshot())
    torch.testing.assert_close(rows["state"][:, :2], torch.tensor([[9.0, 9.0], [4.0, 4.0], [1.0, 1.0]]))
    torch.testing.assert_close(rows["vectors"], torch.full((3, 2), -1.0))
    assert rows["counts"].tolist() == [3, 2, 1]


@pytest.mark.parametrize(("cls", "keep"), [("Adam", 1.0), ("AdamW", 1 - 0.1 * 0.2), ("AdamWTF", 1 - 0.2)])
def test_recis_13_adam_formulas_and_untouched_rows(cls, keep):
    engine, handle = one(1, init=kv.init.Constant(1.0))
    options = {} if cls == "Adam" else {"weight_decay": 0.2}
    opt = getattr(kv.optim, cls)(engine, lr=0.1, betas=(0.9, 0.99), eps=0.01, **options)
    train(engine, opt, 5.0, f=ids(2))
    untouched = {part: t[-1] for part, t in ref.sort_rows(handle.snapshot()).items()}
    p, m, v = 1.0, 0.0, 0.0
    for t, g in ((2, 3.0), (3, -1.0), (4, 2.0)):
        train(engine, opt, g, f=ids(1))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        alpha = 0.1 * (1 - 0.99**t) ** 0.5 / (1 - 0.9**t)
        p = p * keep - alpha * m / (v**0.5 + 0.01)
    rows = ref.sort_rows(handle.snapshot())
    torch.testing.assert_close(rows["vectors"][0], torch.tensor([p]))
    torch.testing.assert_close(rows["state"][0, :2], torch.tensor([m, v]))
    assert all(torch.equal(rows[part][-1], tensor) for part, tensor in untouched.items())


def test_recis_14_age_removes_rows_not_seen_for_so_many_steps():
    engine, handle = one(evict=kv.eviction.Age(steps=3))
    engine({"f": ids(1)})
    for _ in range(3):
        engine({"f": ids(2)})
        handle.evict()
    assert keys_of(handle) == [1, 2]  # 1 was last seen at step 1, which is not before 4 - 3
    engine({"f": ids(2)})
    handle.evict()
    assert keys_of(handle) == [2]


def test_age_0_keeps_only_the_rows_of_the_last_step():
    engine, handle = one(evict=kv.eviction.Age(0, every=2))
    engine({"f": ids(1, 2)})
    assert keys_of(handle) == [1, 2]  # not checked at step 1
    engine({"f": ids(2, 3)})
    assert keys_of(handle) == [2, 3]


def test_recis_14_freed_rows_are_reset_and_reused():
    engine, handle = one(8, shards=1)  # each shard has its own free rows, so several drift a little
    opt = kv.optim.Adagrad(engine, lr=0.1)
    sizes = []
    for round_ in range(12):
        fresh = torch.arange(round_ * 1000, (round_ + 1) * 1000)
        engine({"f": fresh})
        clean = ref.sort_rows(handle.snapshot())
        other, other_handle = one(8)
        other({"f": fresh})
        assert torch.equal(clean["vectors"], ref.sort_rows(other_handle.snapshot())["vectors"])
        assert not clean["state"].any()
        assert clean["counts"].eq(1).all()
        train(engine, opt, f=fresh)
        handle.evict_keys(fresh)
        assert handle.rows == 0
        sizes.append(handle.bytes - 8 * handle.stats()["evicted"])  # the list of evicted keys may stay
    assert max(sizes[3:]) <= max(sizes[:3])


def test_rows_are_a_table_with_the_strings_their_keys_came_from():
    words = ["ann", "bob", "never seen"]
    keys = kv.ids.farm(words)
    engine = kv.EmbeddingEngine({"user": kv.Table(3)})
    engine({"user": keys[:2]})
    engine({"user": torch.tensor([5])})
    users = engine.table("user")
    rows = users.to_arrow(dict(zip(words, keys.tolist(), strict=True))).to_pandas().set_index("key")
    assert sorted(rows.index) == sorted([*keys[:2].tolist(), 5])
    assert rows.string[keys[0].item()] == "ann"
    assert rows.string.isna()[5]
    assert rows.vector[5].tolist() == users.vectors([5])[0].tolist()
    assert rows["count"][5] == 1
    assert users.to_arrow().column_names == ["key", "vector", "count", "last_step"]
    unsigned = {word: key % 2**64 for word, key in zip(words, keys.tolist(), strict=True)}
    assert users.to_arrow(unsigned) == users.to_arrow(dict(zip(words, keys, strict=True)))
    for wrong in (words, dict(zip(keys.tolist(), words, strict=True)), {"ann": "5"}):
        with pytest.raises(TypeError, match=r"strings expects ids by text, dict\(zip\("):
            users.to_arrow(wrong)
