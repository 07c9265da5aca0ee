"""The engine and its optimizers inside ordinary PyTorch: autograd modes, schedulers, state, copies."""

import copy
import gc
import os
import pickle
import weakref

import pytest
import reference as ref
import torch
from embedding_helpers import ids, keys_of, one, train
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook

import karvan as kv


def test_entries_without_a_table_pass_through():
    engine, _ = one()
    price = torch.rand(2)
    out = engine(kv.Batch({"price": price, "f": ids(1, 2)}))
    assert list(out) == ["f", "price"]
    assert out["price"] is price


def test_id_tensors_of_one_and_two_dimensions():
    engine, handle = one()
    out = engine({"f": torch.tensor([[1, 2], [3, 3]])})["f"]
    vectors = handle.vectors(ids(1, 2, 3))
    torch.testing.assert_close(out, torch.stack([vectors[0] + vectors[1], 2 * vectors[2]]))
    assert torch.equal(engine({"f": torch.arange(10)[1:6:2]})["f"][0], vectors[0])


def test_no_grad_and_eval_outputs_carry_no_gradient():
    engine, handle = one()
    assert engine({"f": ids(1)})["f"].requires_grad
    with torch.no_grad():
        assert not engine({"f": ids(1, 2)})["f"].requires_grad
    assert handle.rows == 1
    assert handle.snapshot().counts.tolist() == [1]


def test_autocast_trains_float32_rows():
    engine, handle = one(dim=4)
    net = torch.nn.Linear(4, 1)
    opt = kv.optim.SGD(engine, lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = engine({"f": ids(1, 2)})["f"]
        loss = net(out).float().sum()
    before = handle.vectors(ids(1))
    assert out.dtype == torch.float32
    loss.backward()
    opt.step()
    expected = before - 0.1 * net.weight.detach().bfloat16().float()
    torch.testing.assert_close(handle.vectors(ids(1)), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_schedulers_of_torch_change_the_rate(name):
    engine, _ = one()
    cls, options = ref.OPTIMIZERS[name]
    opt = getattr(kv.optim, cls)(engine, **options)
    step = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    rates = []
    for _ in range(5):
        rates.append(opt.param_groups[0]["lr"])
        train(engine, opt, f=ids(1))
        step.step()
    assert rates == pytest.approx([options["lr"] * x for x in (1, 1, 0.1, 0.1, 0.01)])


def test_step_hooks_are_called_while_they_are_registered():
    engine, _ = one()
    opt = kv.optim.SGD(engine, lr=1.0)
    calls: list[str] = []
    hooks = [
        opt.register_step_pre_hook(lambda *_: calls.append("pre")),
        opt.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post of all")),
    ]
    train(engine, opt, f=ids(1))
    assert calls == ["pre", "post", "post of all"]
    for hook in hooks:
        hook.remove()
    train(engine, opt, f=ids(1))
    assert len(calls) == 3


def test_the_profiler_sees_steps():
    engine, _ = one()
    opt = kv.optim.SGD(engine, lr=1.0)
    with torch.autograd.profiler.profile() as profile:
        train(engine, opt, f=ids(1))
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.function_events}


def test_a_scheduled_rate_reaches_the_rows():
    engine, handle = one(init=kv.init.Constant(0.0))
    opt = kv.optim.SGD(engine, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    for expected in (-1.0, -1.5, -1.75):
        train(engine, opt, f=ids(1))
        schedule.step()
        assert handle.vectors(ids(1)).tolist() == [[expected] * 2]


def test_adagrad_with_lr_decay_is_that_of_torch():
    engine, handle = one(init=kv.init.Constant(1.0))
    opt = kv.optim.Adagrad(engine, lr=0.5, lr_decay=0.3, initial_accumulator_value=0.1)
    same = torch.nn.Parameter(torch.ones(1, 2))
    other = torch.optim.Adagrad([same], lr=0.5, lr_decay=0.3, initial_accumulator_value=0.1)
    for factor in (1.0, -2.0, 0.5, 3.0):
        (engine({"f": ids(1)})["f"] * factor).sum().backward()
        (same * factor).sum().backward()
        for each in (opt, other):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(handle.vectors(ids(1)), same.detach())
    with pytest.raises(ValueError, match="lr_decay must be finite and not negative"):
        kv.optim.Adagrad(engine, lr_decay=-1.0)


def test_groups_have_their_own_rates():
    tables = {name: kv.Table(2, init=kv.init.Constant(0.0)) for name in ("user", "item")}
    engine = kv.EmbeddingEngine(tables)
    groups = [{"params": engine.table("user"), "lr": 1.0}, {"params": engine.table("item")}]
    opt = kv.optim.SGD(groups, lr=0.25)
    assert [group["lr"] for group in opt.param_groups] == [1.0, 0.25]
    train(engine, opt, user=ids(1), item=ids(1))
    assert engine.table("user").vectors(ids(1)).tolist() == [[-1.0] * 2]
    assert engine.table("item").vectors(ids(1)).tolist() == [[-0.25] * 2]


@pytest.mark.parametrize("name", ref.OPTIMIZERS)
def test_training_continues_from_snapshot_and_state_dict(name):
    cls, options = ref.OPTIMIZERS[name]

    def start():
        engine, handle = one(3)
        return engine, handle, getattr(kv.optim, cls)(engine, **options)

    def steps(engine, opt, numbers):
        for i in numbers:
            train(engine, opt, 0.5 + i, f=ids(i % 3, 7))

    engine, handle, opt = start()
    steps(engine, opt, range(6))
    first, first_handle, first_opt = start()
    steps(first, first_opt, range(3))
    second, second_handle, second_opt = start()
    second_handle.load(first_handle.snapshot())
    second_opt.load_state_dict(first_opt.state_dict())
    steps(second, second_opt, range(3, 6))
    expected, received = ref.sort_rows(handle.snapshot()), ref.sort_rows(second_handle.snapshot())
    assert all(torch.equal(received[part], expected[part]) for part in ("keys", "vectors", "state", "counts"))


def test_an_optimizers_state_dict_survives_torch_save(tmp_path):
    engine, _ = one()
    opt = kv.optim.Adam(engine, lr=0.5)
    train(engine, opt, f=ids(1))
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    loaded = torch.load(tmp_path / "opt.pt", weights_only=True)
    other = kv.optim.Adam(one()[0], lr=0.1)
    other.load_state_dict(loaded)
    assert other.param_groups[0]["lr"] == 0.5


@given(
    p=st.floats(-1, 1, width=32),
    gradients=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6),
    eps=st.sampled_from([1e-8, 1e-3]),
)
def test_nesterov_and_amsgrad_are_those_of_torch(p, gradients, eps):
    """Of a dense parameter; torch's AMSGrad differs only in where it adds eps, so it gets eps there, too."""
    pairs = [
        (kv.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (kv.optim.AdamW, torch.optim.AdamW, {"lr": 0.1, "eps": eps, "weight_decay": 0.1, "amsgrad": True}),
    ]
    for sparse, dense, options in pairs:
        engine, handle = one(1, init=kv.init.Constant(p))
        opt = sparse(engine, **options)
        parameter = torch.nn.Parameter(torch.tensor([[p]], dtype=torch.float64))
        state = {}
        for step, gradient in enumerate(gradients, 1):
            train(engine, opt, gradient, f=ids(7))
            if "eps" in options:
                options["eps"] = eps / (1 - 0.999**step) ** 0.5
            peer = dense([parameter], **options)
            peer.state[parameter].update(state)
            parameter.grad = torch.full_like(parameter, gradient)
            peer.step()
            state = peer.state[parameter]
        torch.testing.assert_close(handle.vectors(ids(7)).double(), parameter.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ref.OPTIMIZERS)
def test_an_optimizer_attached_late_trains_rows_that_were_there_before(name):
    cls, options = ref.OPTIMIZERS[name]
    late_engine, late = one(3)
    early_engine, early = one(3)
    early_opt = getattr(kv.optim, cls)(early_engine, **options)
    late_engine({"f": ids(1, 2)})
    early_engine({"f": ids(1, 2)})
    late_opt = getattr(kv.optim, cls)(**options)
    late_opt.attach(late_engine)
    for engine, opt in ((late_engine, late_opt), (early_engine, early_opt)):
        train(engine, opt, 0.7, f=ids(2, 3))
    expected, received = ref.sort_rows(early.snapshot()), ref.sort_rows(late.snapshot())
    assert all(torch.equal(received[part], expected[part]) for part in expected)


def test_gradients_are_not_kept_for_tables_without_an_optimizer():
    """A model whose embeddings nobody trains must not gather gradients for ever."""
    engine, handle = one(init=kv.init.Constant(0.0))
    engine({"f": ids(1)})["f"].sum().backward()
    optimizer = kv.optim.SGD(engine, lr=1.0)
    optimizer.step()
    assert handle.vectors(ids(1)).tolist() == [[0.0, 0.0]]
    engine({"f": ids(1)})["f"].sum().backward()
    optimizer.step()
    assert handle.vectors(ids(1)).tolist() == [[-1.0, -1.0]]


def test_one_optimizer_for_two_engines_of_a_module():
    model = torch.nn.ModuleList([one(init=kv.init.Constant(0.0))[0] for _ in range(2)])
    opt = kv.optim.SGD(model, lr=1.0)
    loss = model[0]({"f": ids(1)})["f"].sum() + 2 * model[1]({"f": ids(1, 2)})["f"].sum()
    loss.backward()
    opt.step()
    assert model[0].table("f").vectors(ids(1)).tolist() == [[-1.0] * 2]
    assert model[1].table("f").vectors(ids(1)).tolist() == [[-2.0] * 2]
    assert [engine.table("f").rows for engine in model] == [1, 2]


def test_step_without_gradients_and_step_twice_change_nothing():
    engine, handle = one()
    opt = kv.optim.SGD(engine, lr=1.0, momentum=0.9)
    opt.step()
    train(engine, opt, f=ids(1))
    before = ref.sort_rows(handle.snapshot())
    opt.step()
    after = ref.sort_rows(handle.snapshot())
    assert all(torch.equal(after[part], tensor) for part, tensor in before.items())


def test_an_engine_is_a_module_without_dense_parameters():
    engine, _ = one()
    model = torch.nn.Sequential(engine, torch.nn.Linear(1, 1))
    engine({"f": ids(1)})["f"].sum().backward()
    trained = [p for p in model.parameters() if p.numel()]
    assert len(trained) == 2  # the dense optimizer sees the Linear only
    model.eval()
    assert not engine.training


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_of_an_engine_is_independent_or_refused_clearly(duplicate):
    engine, handle = one()
    engine({"f": ids(1, 2)})
    try:
        twin = duplicate(engine)
    except (TypeError, NotImplementedError, RuntimeError, ValueError) as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "EmbeddingEngine" in refusal  # says what, instead of naming some inner object
        assert "engine.state_dict(rows=True)" in refusal  # and what to do
        return
    assert torch.equal(twin.table("f").vectors(ids(1, 2)), handle.vectors(ids(1, 2)))
    train(twin, kv.optim.SGD(twin, lr=1.0), f=ids(1, 3))
    assert keys_of(handle) == [1, 2]
    assert not torch.equal(twin.table("f").vectors(ids(1)), handle.vectors(ids(1)))


def test_two_optimizers_share_the_tables_of_an_engine():
    engine = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(4)})
    users = kv.optim.SGD(engine.table("user"), lr=1.0)
    items = kv.optim.SGD(engine.table("item"), lr=0.5)
    out = engine({"user": torch.tensor([1]), "item": torch.tensor([2])})
    before = out["user"].detach().clone(), out["item"].detach().clone()
    (out["user"].sum() + out["item"].sum()).backward()
    users.step()
    users.step()  # its gradients are used up, the other optimizer's are not
    items.step()
    torch.testing.assert_close(engine.table("user").vectors([1]), before[0] - 1.0)
    torch.testing.assert_close(engine.table("item").vectors([2]), before[1] - 0.5)


def test_outputs_joined_by_cat_train_like_separate_ones():
    """torch.cat gives back slices of one gradient, which are read without a copy."""
    ids = {"a": torch.arange(20) % 7, "b": torch.arange(20) % 5}
    weight = torch.randn(20, 24)
    joined, separate = (kv.EmbeddingEngine({"a": kv.Table(16), "b": kv.Table(8)}) for _ in range(2))
    for engine in (joined, separate):
        optimizer = kv.optim.Adagrad(engine, lr=0.1)
        out = engine(ids)
        if engine is joined:
            loss = (torch.cat([out["a"], out["b"]], 1) * weight).sum()
        else:
            loss = (out["a"] * weight[:, :16]).sum() + (out["b"] * weight[:, 16:]).sum()
        loss.backward()
        optimizer.step()
    for name in ("a", "b"):
        assert (joined.table(name).snapshot().vectors == separate.table(name).snapshot().vectors).all()


def test_outputs_can_be_changed_in_place():
    engine = kv.EmbeddingEngine({"a": kv.Table(4)})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    out = engine({"a": torch.tensor([3])})["a"]
    before = out.detach().clone()
    out.mul_(2.0)
    out.sum().backward()
    optimizer.step()
    torch.testing.assert_close(engine.table("a").vectors([3]), before - 2.0)


def test_rows_are_released_with_their_engine():
    engine = kv.EmbeddingEngine({"a": kv.Table(64)})
    optimizer = kv.optim.Adagrad(engine)
    out = engine({"a": torch.arange(1000)})["a"]
    out.sum().backward()
    optimizer.step()
    alive = weakref.ref(engine.store)
    gc.disable()
    try:
        del engine, optimizer, out
        assert alive() is None, "the store should go with its last user, without the garbage collector"
    finally:
        gc.enable()


def test_a_forked_child_looks_up_with_threads_of_its_own_and_leaves_the_parent_alone():
    engine, handle = one()
    opt = kv.optim.SGD(engine, lr=0.1)
    many = torch.arange(20_000)
    kv.set_num_threads(2)
    train(engine, opt, f=many)
    before = handle.vectors(many)
    child = os.fork()
    if child == 0:  # whatever happens here must not come back into the test runner
        try:
            torch.set_num_threads(1)  # torch's own threads do not survive a fork
            engine({"f": many + 10_000})
            os._exit(0 if handle.rows == 30_000 and torch.equal(handle.vectors(many), before) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.rows == 20_000
    train(engine, opt, f=many)
    assert not torch.equal(handle.vectors(many), before)
