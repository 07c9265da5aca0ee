"""Embedding workers: ids with them, vectors and gradients as if they were here."""

import itertools

import pytest
import torch
from worker_helpers import all_layouts, batches, in_memory, rows_of, tensors, train

import karvan as kv
from karvan.embedding import HashStack
from karvan.protocol.embedding_worker import WORKER_CALLS
from karvan.wire import RefusedError


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_results_are_those_of_memory_bit_for_bit(job, servers, workers):
    given = batches(6)
    reference, expected = in_memory(given)
    expected_eval = tensors(reference.eval()(batches(1, seed=9)[0]))
    rows = rows_of(reference)
    loader = job(servers, workers)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    seen = train(engine, [loader.send(batch) for batch in given], kv.optim.Adagrad(engine, lr=0.1))
    for a, b in zip(itertools.chain(*seen), itertools.chain(*expected), strict=True):
        assert torch.equal(a, b)
    engine.eval()
    for a, b in zip(tensors(engine(loader.send(batches(1, seed=9)[0]))), expected_eval, strict=True):
        assert torch.equal(a, b)
    assert rows_of(engine) == rows
    assert engine.store.window.most == 1
    assert loader.resent == 0


@pytest.mark.parametrize("accumulate", [2, 3])
def test_passes_of_a_step_may_be_with_several_workers(job, accumulate):
    given = batches(6)
    reference, _ = in_memory(given, accumulate)
    rows = rows_of(reference)
    loader = job(2, 2)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    mixed = [loader.send(batch) if number != 3 else batch for number, batch in enumerate(given)]
    train(engine, mixed, kv.optim.Adagrad(engine, lr=0.1), accumulate)
    assert rows_of(engine) == rows


def test_ids_of_the_trainer_itself_need_no_worker(job):
    given = batches(3)
    reference, _ = in_memory(given)
    rows = rows_of(reference)
    job(2, 2)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    train(engine, given, kv.optim.Adagrad(engine, lr=0.1))
    assert rows_of(engine) == rows


def test_features_without_a_gradient_leave_their_keys_alone(job):
    given = batches(3)

    def run(engine, sent):
        optimizer = kv.optim.Adam(engine, lr=0.1, amsgrad=True)
        for batch in sent:
            outputs = engine(batch)
            (outputs["user"].sum() + outputs["item"].sin().sum()).backward()
            optimizer.step()
        return rows_of(engine)

    kv.connect("memory")
    expected = run(kv.EmbeddingEngine(all_layouts(), seed=5), given)
    loader = job(2, 2)
    found = run(kv.EmbeddingEngine(all_layouts(), seed=5), [loader.send(batch) for batch in given])
    assert found == expected


@pytest.mark.parametrize("staleness", [2, 4])
def test_hybrid_training_stays_within_its_bound(job, staleness):
    loader = job(2, 2, staleness=staleness)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    engine.hold_prepared(staleness + 2)
    given = [loader.send(batch) for batch in batches(16)]
    seen = train(engine, given, kv.optim.Adagrad(engine, lr=0.01), ahead=staleness)
    engine.store.window.drain()
    assert len(seen) == 16
    assert engine.store.window.most == staleness
    assert engine.store.window.lookups == 16


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_an_evaluation_has_the_gradients_of_the_step_before(job, where, staleness):
    loader = job(2, 1, staleness=staleness)
    engine = kv.EmbeddingEngine({"user": kv.Table(1, init=kv.init.Constant(0.0))})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    batch = {"user": torch.arange(12)}
    for step in range(1, 9):
        engine.train()
        engine(loader.send(batch))["user"].sum().backward()
        optimizer.step()
        engine.eval()
        asked = loader.send(batch) if where == "worker" else dict(batch)
        if step % 2:
            engine.prepare(asked, training=False)
        assert engine(asked)["user"].tolist() == [[-float(step)]] * 12


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_half_wires_are_near_memory(job, wire):
    given = batches(3)
    _, expected = in_memory(given)
    loader = job(1, 1, wire=wire)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    seen = train(engine, [loader.send(batch) for batch in given], kv.optim.Adagrad(engine, lr=0.1))
    for a, b in zip(itertools.chain(*seen), itertools.chain(*expected), strict=True):
        assert torch.allclose(a, b, atol=0.06)


def test_nan_in_one_slot_skips_only_that_table_and_is_counted(job):
    loader = job(1, 1)
    engine = kv.EmbeddingEngine({"a": kv.Table(4), "b": kv.Table(4)})
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    batch = {"a": torch.arange(4), "b": torch.arange(4)}
    engine(loader.send(batch))["a"].sum().backward()  # inserts
    optimizer.zero_grad()
    before = rows_of(engine)
    outputs = engine(loader.send(batch))
    bad = torch.ones(4, 4)
    bad[2, 1] = torch.nan
    torch.autograd.backward([outputs["a"], outputs["b"]], [bad, torch.ones(4, 4)])
    assert not optimizer.gradients_finite()
    optimizer.step()
    after = rows_of(engine)
    assert after["a"][1] == before["a"][1]
    assert after["b"][1] != before["b"][1]
    assert engine.table("a").stats()["skipped_updates"] == 1
    assert engine.table("b").stats()["skipped_updates"] == 0


def test_nan_where_there_is_no_id_is_of_no_harm(job):
    loader = job(1, 1)
    tables = {"sum": kv.Table(2), "sequence": kv.Table(2, combiner="sequence", length=3)}
    tables["index"] = kv.Table(2, combiner="index", length=3)
    engine = kv.EmbeddingEngine(tables)
    optimizer = kv.optim.SGD(engine, lr=1.0)
    lists = kv.Ragged.from_lists([[1, 2], []])
    outputs = engine(loader.send(dict.fromkeys(tables, lists)))
    pooled, padded, distinct = torch.ones(2, 2), torch.ones(2, 3, 2), torch.ones(3, 2)
    pooled[1], padded[1], padded[0, 2], distinct[0] = torch.nan, torch.nan, torch.inf, torch.nan
    vectors = [outputs["sum"], outputs["sequence"].values, outputs["index"].vectors]
    torch.autograd.backward(vectors, [pooled, padded, distinct])
    assert optimizer.gradients_finite()
    optimizer.step()
    for table in engine.tables():
        assert table.stats()["skipped_updates"] == 0
        assert torch.isfinite(torch.tensor(rows_of(engine)[table.name][1])).all()


def test_scaled_gradients_are_divided_before_they_are_sent(job):
    def run(engine, batch, scale):
        engine.gradient_scale = scale
        optimizer = kv.optim.SGD(engine, lr=1.0)
        (engine(batch)["user"].sum() * scale).backward()
        optimizer.step()
        return rows_of(engine)

    loader = job(1, 1)
    tables = {"user": kv.Table(4)}
    batch = {"user": torch.arange(6)}
    plain = run(kv.EmbeddingEngine(tables), loader.send(batch), 1.0)
    loader = job(1, 1)
    assert run(kv.EmbeddingEngine(tables), loader.send(batch), 1024.0) == plain


def test_layouts_are_those_that_the_tables_promise(job):
    loader = job(2, 2)
    tables = {
        "sum": kv.Table(2, name="shared"),
        "root": kv.Table(2, name="shared", combiner="sqrtn"),
        "raw": kv.Table(2, name="shared", combiner="sequence", length=3),
        "other": kv.Table(2),
    }
    engine = kv.EmbeddingEngine(tables)
    lists = kv.Ragged.from_lists([[7, 8, 9, 10], [], [7]])
    outputs = engine(loader.send(dict.fromkeys(tables, lists)))
    assert [name for name in outputs if name in tables] == list(tables)
    assert outputs["sum"].shape == (3, 2)
    assert outputs["raw"].values.shape == (3, 3, 2)
    assert outputs["raw"].mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert outputs["sum"][1].tolist() == [0, 0]
    assert torch.equal(outputs["raw"].values[2, 0], outputs["sum"][2])  # slots of one table share rows
    assert not torch.equal(outputs["other"][2], outputs["sum"][2])
    assert torch.allclose(outputs["root"][0] * 2, outputs["sum"][0])
    optimizer = kv.optim.SGD(engine, lr=1.0)
    before = dict(zip(*rows_of(engine)["shared"][:2], strict=True))
    outputs["root"].sum().backward()
    optimizer.step()
    after = dict(zip(*rows_of(engine)["shared"][:2], strict=True))
    moved = {key: round(before[key][0] - after[key][0], 4) for key in before}
    assert moved == {7: 1.5, 8: 0.5, 9: 0.5, 10: 0.5}  # the gradient is divided by the root, too


def test_a_batch_may_lack_a_feature_but_other_kinds_of_features_are_refused(job):
    loader = job(1, 1)
    engine = kv.EmbeddingEngine({"a": kv.Table(2), "b": kv.Table(2, missing="empty")})
    outputs = engine(loader.send({"a": torch.tensor([1, 2])}))
    assert outputs["a"].all()
    assert outputs["b"].tolist() == [[0, 0], [0, 0]]
    with pytest.raises(ValueError, match="as embedding workers take them, got lists of lists"):
        engine(loader.send({"a": torch.tensor([[[1]], [[2]]])}))
    reading = kv.EmbeddingEngine({"a": kv.Table(2), "c": kv.Table(2, name="a", read_only=True)})
    with pytest.raises(ValueError, match=r"read_only=True \('c'\) expect their ids at the trainer"):
        reading(loader.send({"a": torch.tensor([1]), "c": torch.tensor([1])}))
    loader.clients[0].forget(list(loader.kept))  # since nobody has trained on them


def test_a_hash_stack_has_the_pinned_buckets(job):
    loader = job(1, 1)
    engine = kv.EmbeddingEngine({"a": kv.Table(2, hash_stack=HashStack(2, 10))})
    engine(loader.send({"a": torch.tensor([12, 23, 34, 56, 78, 90])}))
    assert sorted(engine.table("a").keys().tolist()) == [0, 2, 5, 6, 7, 8, 10, 11, 12, 16, 17, 18]


def test_what_is_done_with_is_forgotten_everywhere(job, clusters):
    loader = job(1, 1)
    engine = kv.EmbeddingEngine({"user": kv.Table(4)})
    optimizer = kv.optim.SGD(engine, lr=0.1)
    for number in range(5):
        outputs = engine(loader.send({"user": torch.arange(number, number + 3)}))
        outputs["user"].sum().backward()
        del outputs
        optimizer.step()
        engine.store.window.drain()
    engine.eval()
    engine(loader.send({"user": torch.arange(3)}))  # carries the news of the last one
    engine(loader.send({"user": torch.arange(3)}))
    told = loader.clients[0].describe()
    assert told["plans"] == 0
    assert told["kept"] <= 1
    assert len(loader.kept) <= 1


def test_ids_that_are_not_there_any_more_are_asked_for_again(job):
    given = batches(1)
    _, expected = in_memory(given)
    loader = job(1, 1)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    sent = loader.send(given[0])
    loader.clients[0].forget([sent[kv.ragged.REFERENCE].name])
    for a, b in zip(tensors(engine(sent)), expected[0], strict=True):
        assert torch.equal(a, b)
    assert loader.resent == 1


def test_calls_that_are_malformed_are_refused(job):
    loader = job(1, 1)
    workers = kv.distributed.current().workers
    engine = kv.EmbeddingEngine({"user": kv.Table(2), "item": kv.Table(2)})
    sent = loader.send({"user": torch.arange(3), "item": torch.arange(3)})
    outputs = engine(sent)
    reference = sent[kv.ragged.REFERENCE]
    head = {"engine": engine.program.name, "store": 1, "sequence": 1, "batches": [1], "mine": [0]}
    head |= {"rules": {}, "steps": {}, "skipped": [], "complete": True, "wire": "float32"}
    head |= {"passes": [{"reference": reference.name, "given": [0, 1]}], "done": [], "gone": []}
    head |= {"declarations": 0}

    def call(arrays, method="backward", **changes):
        told = {"engine": engine.program.name, "features": engine.program.features_json, "wire": "float32"}
        told |= {"tables": {}, "declarations": 0}
        sent = (WORKER_CALLS[method], {**head, **changes}, arrays)
        future = workers.begin(0, "backward", *sent, engine=told, references=[reference])
        return future.result(60)

    good = torch.zeros(12).numpy()
    some = [{"reference": reference.name, "given": [1]}]
    for arrays, changes, text in [
        ([good[:11]], {}, "expected 12 gradients of float32"),
        ([good.astype("float64")], {}, "to be float32 .*, got float64"),
        ([], {}, "expected 1 arrays, got 0"),
        ([good], {"passes": [{"reference": reference.name, "given": [0, 2]}]}, "of 2 features"),
        ([good[:6]], {"passes": some}, "of all 2 features, got 1"),
        ([good], {"mine": [4]}, "one of 1 passes, got number 4"),
        ([good], {"batches": [77], "passes": [{"reference": "x", "given": [0, 1]}]}, "reference 'x'"),
    ]:
        if text == "reference 'x'":
            with pytest.raises(RuntimeError, match=text):
                call(arrays, **changes)
            continue
        with pytest.raises(RefusedError, match=text):
            call(arrays, **changes)
    with pytest.raises(RefusedError, match="claim: expected the head with"):
        call([], "claim", done=None)
    call([good])  # and nothing of it has done any harm
    assert outputs["user"].shape == (3, 2)


def test_a_claim_of_what_nobody_sent_is_an_error_that_says_so(job):
    loader = job(1, 1)
    kv.distributed.current().workers.resend = None
    engine = kv.EmbeddingEngine({"user": kv.Table(4)})
    batch = {kv.ragged.REFERENCE: kv.ragged.IdsReference(0, "nothing", 3)}
    with pytest.raises(
        RuntimeError, match=r"worker 0: expected the ids of reference 'nothing'.*never arrived"
    ):
        engine(batch)
    with pytest.raises(ValueError, match="one of 1 embedding workers"):
        engine({kv.ragged.REFERENCE: kv.ragged.IdsReference(1, "elsewhere", 3)})
    with pytest.raises(
        ValueError, match="Feature 'user' of table 'user' is not in the batch, which has: item"
    ):
        engine(loader.send({"item": torch.arange(3)}))


def test_a_store_in_memory_takes_no_references():
    kv.connect("memory")
    engine = kv.EmbeddingEngine({"user": kv.Table(4)})
    with pytest.raises(ValueError, match='expected an engine that was created after connect\\("remote"'):
        engine({kv.ragged.REFERENCE: kv.ragged.IdsReference(0, "x", 3)})
    empty = engine({kv.ragged.REFERENCE: kv.ragged.IdsReference(0, "", 0)})
    assert empty["user"].shape == (0, 4)


class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = kv.EmbeddingEngine(all_layouts(), seed=5)
        self.net = torch.nn.Linear(12, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.net(torch.cat([vectors["user"], vectors["item"]], 1)).squeeze(1)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_trainer_fits_on_references(job, staleness):
    def fit(send):
        model = Clicks()
        trainer = kv.Trainer(
            model,
            kv.losses.BinaryCrossEntropy(),
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            sparse_optimizer=kv.optim.Adagrad(lr=0.1),
            progress="none",
        )
        labelled = ({**batch, "label": torch.arange(12) % 2 * 1.0} for batch in batches(10))
        result = trainer.fit([send(batch) for batch in labelled])
        return model, result.step, rows_of(model.embeddings), model.net.weight.tolist()

    kv.connect("memory")
    expected = fit(kv.Batch)[1:]
    loader = job(2, 2, staleness=staleness)
    model, *found = fit(lambda batch: loader.send(batch, ids=all_layouts()))
    assert model.embeddings.store.window.most <= staleness
    assert found[0] == expected[0] == 10
    if staleness == 1:
        assert found == list(expected)


def test_a_stream_that_names_no_ids_beside_workers_is_an_error(job):
    before = kv.data.from_loaders(loaders=["127.0.0.1:9"])  # nobody knew of workers then
    job(1, 1)
    for attempt in (lambda: kv.data.from_loaders(loaders=["127.0.0.1:9"]), lambda: next(iter(before))):
        with pytest.raises(
            ValueError, match=r'has embedding workers, .*kv\.data\.from_loaders\(ids=\["user", "item"\]\)'
        ):
            attempt()
    assert kv.data.from_loaders(loaders=["127.0.0.1:9"], ids=[]).epoch == 0  # as it was said
