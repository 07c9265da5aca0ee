"""Every call of every service with wrong heads and arrays: each is refused, and nothing changes."""

import contextlib
import math

import numpy as np
import pytest
import torch
from malformed_calls import SUBJECTS
from server_calls import KEYS, ElasticServerSubject, ServerSubject

import karvan as kv
from karvan.protocol.values import RunHello
from karvan.store.types import FeatureSpec
from karvan.wire import RefusedError

WRONG = {"surely": "wrong"}  # for whatever is expected
# Calls whose first array may have any size, and fields that may be negative.
ANY_SIZE = {("erase", 0)}
NEGATIVE = {"amount"}
OPAQUE = {"ack"}  # may be anything


@pytest.fixture(params=SUBJECTS)
def subject(request, tmp_path):
    made = SUBJECTS[request.param](tmp_path)
    with contextlib.closing(made):
        yield made


def heads(head, optional=()):
    """Wrong ones that follow from a right one, and what is wrong with each."""
    yield {**head, "surely": 1}, "surely"
    for name, value in head.items():
        if name not in optional:
            yield {other: each for other, each in head.items() if other != name}, name
        if name in OPAQUE:
            continue
        yield {**head, name: WRONG}, name
        if type(value) in (int, float):
            yield {**head, name: math.nan}, name
            if name not in NEGATIVE:
                yield {**head, name: -1 if type(value) is int else math.inf}, name
            yield {**head, name: 10**30 if type(value) is int else -math.inf}, name
        if isinstance(value, list) and value:
            yield {**head, name: [*value, WRONG]}, name


def wrong_arrays(method, arrays):
    """Wrong lists of arrays that follow from a right one."""
    yield [*arrays, np.zeros(2, bool)]
    for place, array in enumerate(arrays):
        rest = list(arrays)
        yield rest[:place] + rest[place + 1 :]
        others = [array.astype(bool), array.reshape(1, *array.shape)]
        if not (method == "put" and array.dtype == np.float32):  # weights may be of any floats
            others.append(array.astype(np.float64))
        for other in others:
            yield [*rest[:place], other, *rest[place + 1 :]]
        if (method, place) not in ANY_SIZE:
            yield [*rest[:place], array[:-1], *rest[place + 1 :]]


def test_what_is_wrong_is_refused_and_changes_nothing(subject):
    assert {*subject.makers, *subject.refuses} == set(subject.service.endpoints)
    for method, (head, arrays) in subject.refuses.items():
        with pytest.raises(RefusedError, match="expected an elastic run"):
            subject.call(method, head, arrays)
    for method in subject.makers:
        head, arrays = subject.make(method)
        before = subject.fingerprint()
        for wrong, name in heads(head, subject.service.endpoints[method].call.head.optional):
            with pytest.raises(RefusedError, match=rf"^{method}: expected .*{name}") as error:
                subject.call(method, wrong, arrays)
            assert len(str(error.value)) < 1000
        for wrong in wrong_arrays(method, arrays):
            with pytest.raises((RefusedError, ValueError), match=r"expected|equal rows|must"):
                subject.call(method, head, wrong)
        assert subject.fingerprint() == before, method
        subject.call(method, head, arrays)
    for method in (None, 7, [], "nothing", "_put"):
        with pytest.raises(RefusedError, match="does not know the call"):
            subject.call(method, {})


def test_a_wrong_hello_is_refused(subject):
    hello = subject.hello()
    for wrong, name in heads(hello, {*RunHello.declaration.optional, "divisor"}):
        if name == "run" and "run" not in wrong:
            continue  # for a worker, that is a loader's
        with pytest.raises(RefusedError, match=name):
            subject.meet(wrong)
    subject.meet(hello)


@pytest.fixture
def server(tmp_path):
    made = ServerSubject(tmp_path)
    with contextlib.closing(made):
        yield made


@pytest.fixture(params=[ServerSubject, ElasticServerSubject])
def any_server(request, tmp_path):
    made = request.param(tmp_path)
    with contextlib.closing(made):
        yield made


def test_gradients_of_another_dtype_are_not_read_as_floats(server):
    head, _ = server.make("push")
    before = server.fingerprint()
    with pytest.raises(RefusedError, match=r"expected gradients\[0\] to be float32 .*, got bool \[300\]"):
        server.call("push", head, [np.zeros(KEYS * 12, bool)] * 2)
    assert server.fingerprint() == before


def test_passes_of_different_tables_are_not_one_push(server):
    first, arrays = server.make("pull")
    server.call("pull", first, arrays)
    other, arrays = server._pull(tables=["u", "t"])
    server.call("pull", other, arrays)
    head, gradients = server._push(batches=[first["batch"], other["batch"]])
    with pytest.raises(RefusedError, match="the same tables"):
        server.call("push", head, gradients)


def test_parts_of_a_push_are_of_the_same_batches(server):
    head, gradients = server.make("push")
    server.call("push", {**head, "mine": [0], "done": []}, gradients[:1])
    with pytest.raises(RefusedError, match="expected passes of the batches"):
        server.call("push", {**head, "batches": head["batches"][:1], "mine": [0]}, gradients[:1])
    server.call("push", {**head, "mine": [1]}, gradients[1:])


def test_a_table_is_looked_up_once_in_a_call(server):
    head, arrays = server._pull(tables=["t", "t"])
    with pytest.raises(RefusedError, match="each of the tables once, got 't' twice"):
        server.call("pull", head, arrays)


def test_a_rate_beyond_float32_is_refused(server):
    head, gradients = server.make("push")
    head["rules"]["t"]["lr"] = 1e300
    with pytest.raises(RefusedError, match=r"expected rules\['t'\]\['lr'\] to be a finite number"):
        server.call("push", head, gradients)


def test_a_table_has_one_dim(server):
    spec = {**server.make("add_table")[0]["spec"], "dim": 5}
    with pytest.raises(ValueError, match="is in the store already"):
        server.call("add_table", {"spec": spec})
    head, arrays = server.make("load")
    with pytest.raises(
        RefusedError, match=r"vectors of table 'u' to be float32 \[5, 8\], got float32 \[5, 4\]"
    ):
        server.call("load", head, [arrays[0], arrays[1][:, :4].copy(), *arrays[2:]])


def test_a_rule_needs_the_state_that_the_rows_have(any_server):
    server = any_server
    head, gradients = server.make("push")
    head["rules"]["t"]["kind"] = "adam"
    with pytest.raises(ValueError, match="floats of optimizer state"):
        server.call("push", head, gradients)


def test_optimizer_state_has_a_size_that_some_optimizer_has(server):
    for size in (2, 3, 5, 9):
        with pytest.raises(RefusedError, match=f"expected 0, 1, 4, 8, 12 floats .*got {size}"):
            server.call("set_state", {"table": "t", "initial": [0.0] * size, "fresh": False})


@pytest.mark.parametrize("betas", [[0.9], [], [None, None], [0.9, 0.9, 0.9], [float("nan")] * 2])
def test_options_that_an_optimizer_cannot_have_are_refused(server, betas):
    arrays = server.state_with(lambda state: state["optimizer"]["options"].update(betas=betas))
    with pytest.raises(RefusedError, match="Adam does not take the options"):
        server.call("load_dense_state", {"model": 2}, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["slots"]["w"].update(exp_avg=torch.ones(1)),
        lambda state: state["slots"]["w"].update(exp_avg=torch.ones(4, 4, dtype=torch.float64)),
        lambda state: state["slots"]["w"].update(exp_avg=7),
        lambda state: state["slots"]["w"].pop("exp_avg"),
        lambda state: state["slots"]["w"]["step"].fill_(-5),
        lambda state: state["slots"]["w"]["step"].fill_(float("nan")),
        lambda state: state["slots"].update(other={}),
        lambda state: state["answers"].update(a=[[1, 2, 3]]),
        lambda state: state["waiting"].append({"trainer": "a"}),
        lambda state: state["optimizer"]["options"].update(betas=[0.9] * 100),
    ],
)
def test_a_dense_state_that_no_server_made_is_refused(server, change):
    before = server.fingerprint()
    with pytest.raises(RefusedError, match="cannot be used"):
        server.call("load_dense_state", {"model": 1}, server.state_with(change))
    assert server.fingerprint() == before
    server.call("push_dense", *server.make("push_dense"))


def test_trainers_of_a_run_agree_on_what_it_is(server):
    with pytest.raises(RefusedError, match="expected a run with 1 trainers, mode hybrid"):
        server.meet({**server.hello(), "trainers": 2})
    with pytest.raises(RefusedError, match="mode sync"):
        server.meet({**server.hello(), "mode": "sync"})


def test_native_entry_points_check_the_sizes_that_they_index_by():
    spec = FeatureSpec
    program = kv.store.LookupProgram([spec("a", "a", dim=2)])
    ids, out = torch.arange(3), torch.zeros(3, 2)
    arrays = kv._native.FeatureArrays(values=ids.data_ptr(), cells=3, samples=3, out=out.data_ptr())
    inputs = [arrays]
    plan = kv._native.Plan(program.native, inputs)
    table = kv._native.Table(
        "a", 4, "float32", ("constant", 0.0, 0.0, 0.0, 0.0), 0, ("always", 0.0, 0), ("never", 0.0, 1), 1
    )
    for wrong in (
        lambda: plan.unique(1),
        lambda: plan.reduce([0, 0], [2, 2]),
        lambda: plan.reduce([out.data_ptr()], []),
        lambda: plan.pool_from([]),
        lambda: plan.pool_from([np.zeros((3, 1), np.float32)]),
        lambda: kv._native.forward(program.native, [], inputs, True, 1, 0.0),
        lambda: kv._native.forward(program.native, [table], inputs, True, 1, 0.0),
        lambda: kv._native.Plan(program.native, []),
        lambda: kv._native.Plan(program.native, [arrays, arrays]),
        lambda: kv._native.prepare(program.native, []),
        lambda: kv._native.forward(program.native, [table], [], True, 1, 0.0),
        lambda: spec("a", "a", dim=0),
        lambda: spec("a", "a", dim=2, stack=0),
        lambda: kv.store.LookupProgram([spec("a", "a", dim=2), spec("b", "a", dim=3)]),
        lambda: kv._native.Gradients.merge([]),
    ):
        with pytest.raises((ValueError, IndexError), match=r"[Ee]xpected"):
            wrong()
    gradients = plan.reduce([out.data_ptr()], [2])
    for wrong in (
        lambda: gradients.keys_and_values(1),
        lambda: gradients.apply([], []),
        lambda: gradients.apply([None], []),
    ):
        with pytest.raises((ValueError, IndexError), match="Expected"):
            wrong()
