"""Mode async: dense parameters on parameter servers, over the wire."""

import contextlib

import numpy as np
import pytest
import torch
from async_helpers import Intruder, assert_same, connected, content
from async_programs import batches, loss, told, trainer_of
from cluster_helpers import Processes, serving
from dense_helpers import start_with
from ranks_helpers import run

import karvan as kv
from karvan import distributed
from karvan.dense.remote import DenseServerProxy
from karvan.discovery.registry import Registry
from karvan.job.environment import ASYNC, HYBRID, SYNC, DenseSettings, choose_dense, choose_mode
from karvan.wire import Client, RefusedError

SGD = {"name": "SGD", "options": {"lr": 0.5}}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize(
    ("name", "servers"),
    [*((name, 3) for name in OPTIMIZERS), ("adam", 1)]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "adam"],
)
def test_one_trainer_has_the_bits_of_memory(tmp_path, name, servers):
    def fit(folder):
        trainer = trainer_of(
            folder,
            dense=OPTIMIZERS[name],
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            gradient_accumulation_steps=2,
            clip_norm=0.05,
            dropout=0.2,
        )
        trainer.fit(batches(), epochs=2, max_steps=9, eval_data=batches(2))

    fit(tmp_path / "memory")
    with connected(servers):
        fit(tmp_path / "async")
    assert_same(tmp_path / "async", tmp_path / "memory", 9)


def test_a_fit_goes_on_in_any_mode(tmp_path):
    def fit(folder, steps):
        trainer_of(folder, dropout=0.2).fit(batches(), epochs=2, max_steps=steps)

    fit(tmp_path / "straight", 20)
    for mode, servers, steps in (
        ("async", 2, 4),
        ("async", 3, 8),
        (None, 0, 11),
        ("async", 1, 15),
        ("sync", 2, 20),
    ):
        if mode is None:
            fit(tmp_path / "moved", steps)
            continue
        with serving(servers) as addresses:
            distributed.connect("remote", servers=addresses, mode=mode, staleness=1)
            fit(tmp_path / "moved", steps)
    assert_same(tmp_path / "moved", tmp_path / "straight", 20)


def test_fits_of_one_trainer_follow_each_other():
    def fits(trainer):
        for _ in range(2):
            trainer.fit(batches(4))
            with torch.no_grad():
                trainer.model.net[0].bias += 1  # between fits the model is the program's
        return dict(trainer.model.named_parameters())

    expected = fits(trainer_of())
    with connected(2):
        received = fits(trainer_of())
    assert [name for name in expected if not torch.equal(expected[name], received[name])] == []


def test_gradients_that_are_not_finite_reach_neither_parameters_nor_rows(tmp_path):
    def fit(folder):
        data = batches(6)
        data[2]["label"][3] = torch.nan
        return trainer_of(folder).fit(data)

    assert fit(tmp_path / "memory").skipped == 1
    with connected(2):
        assert fit(tmp_path / "async").skipped == 1
    assert_same(tmp_path / "async", tmp_path / "memory", 6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rejected_step_is_computed_again_and_rows_see_it_once(tmp_path, accumulate):
    def fit(folder, times):
        trainer = trainer_of(
            folder, loss=Intruder(times, servers=(0, 1)), gradient_accumulation_steps=accumulate
        )
        trainer.fit(batches(8), epochs=2)
        return trainer

    fit(tmp_path / "memory", 0)
    with connected(2, tolerance=0):
        trainer = fit(tmp_path / "async", 5)
        # With two passes, the fifth time is in the first pass of the third attempt.
        assert trainer.dense.staleness.rejected == (5 if accumulate == 1 else 3)
    assert_same(tmp_path / "async", tmp_path / "memory", 16 // accumulate)


def test_servers_that_accepted_what_others_rejected_apply_it_once(tmp_path):
    def fit(folder, times):
        trainer = trainer_of(folder, loss=Intruder(times))
        trainer.fit(batches(8))
        return trainer

    fit(tmp_path / "memory", 0)
    with connected(2, tolerance=0):
        first, second = (each["1"] for each in told(fit(tmp_path / "async", 3)))
    assert (first["version"], first["rejected"], first["repeated"]) == (8 + 3, 3, 0)
    assert (second["version"], second["rejected"], second["repeated"]) == (8, 0, 3)
    (found, _), (expected, _) = content(tmp_path / "async", 8), content(tmp_path / "memory", 8)
    for table in ("user", "item"):
        for column in (0, 3, 4):  # keys, how often each was used, and when
            np.testing.assert_array_equal(found[table, column], expected[table, column])


def test_a_step_that_is_rejected_for_ever_is_an_error():
    with connected(1, tolerance=0):
        trainer = trainer_of(loss=Intruder(10_000))
        with pytest.raises(RuntimeError, match=r"rejected the gradients of a step \d+ times"):
            trainer.fit(batches(1))


def test_a_rate_is_divided_by_staleness_if_asked_for(tmp_path):
    def fit(folder, rate, times):
        trainer = trainer_of(folder, dense=lambda p: torch.optim.SGD(p, rate), loss=Intruder(times, steps=4))
        trainer.fit(batches(1))
        return {
            name: each.detach() for name, each in trainer.model.named_parameters()
        }, trainer.dense.staleness

    slower, _ = fit(None, 0.1, 0)
    with connected(1, lr_staleness=True):
        received, staleness = fit(None, 0.4, 1)
    assert (staleness.largest, staleness.rejected) == (4, 0)
    assert all(torch.equal(received[name], slower[name]) for name in slower)
    usual, _ = fit(None, 0.4, 0)
    with connected(1):
        received, _ = fit(None, 0.4, 1)
    assert all(torch.equal(received[name], usual[name]) for name in usual)


def learns(of_rank):
    half = len(of_rank["losses"]) // 2
    return np.nanmean(of_rank["losses"][half:]) < np.nanmean(of_rank["losses"][:half]) - 0.05


@pytest.mark.slow
def test_two_trainers_learn_and_end_with_what_the_servers_have(tmp_path, monkeypatch):
    with Processes(2) as cluster:
        more = {"KARVAN_MODE": "async", "KARVAN_STALENESS": "2", "KARVAN_LR_STALENESS": "1"}
        for name, value in {**cluster.environment(), **more}.items():
            monkeypatch.setenv(name, value)
        one, other = run(2, "async_programs:together", steps=60, checkpoints=str(tmp_path), counts=[12, 9])
    assert one["settings"] == other["settings"] == ("async", 2, True)
    assert learns(one)
    assert learns(other)
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert one["result"]["evaluation"] == other["result"]["evaluation"]
    # 60 steps are 5 epochs of 12 rounds, in 3 of which the second trainer has nothing to push.
    assert (one["staleness"]["pushes"], other["staleness"]["pushes"]) == (60, 45)
    assert [each["1"]["version"] for each in one["told"]] == [105, 105]
    monkeypatch.undo()
    alone = trainer_of(tmp_path)
    alone.fit(batches(), epochs=5)  # loads, and has nothing more to do
    assert all(torch.equal(each, one["model"][name]) for name, each in alone.model.named_parameters())


@pytest.mark.slow
def test_loops_of_two_trainers_learn_and_end_with_what_the_servers_have():
    with serving(2) as addresses:
        options = {"servers": addresses, "mode": "async", "staleness": 2, "lr_staleness": True}
        one, other = run(2, "async_programs:loop", epochs=5, counts=[12, 9], **options)
    assert learns(one)
    assert learns(other)
    assert (one["staleness"]["pushes"], other["staleness"]["pushes"]) == (60, 45)
    assert [each["1"]["version"] for each in one["told"]] == [105, 105]
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert torch.equal(one["evaluated"], other["evaluated"])


@pytest.mark.slow
def test_trainers_of_the_sync_policy_compute_rejected_steps_again(monkeypatch):
    with serving(1) as addresses:
        options = {"servers": addresses, "mode": "async", "grads_to_wait": 2, "tolerance": 0}
        one, other = run(2, "async_programs:together", steps=30, overtaken=True, **options)
    assert other["staleness"]["rejected"] > 0
    counts = one["told"][0]["1"]
    assert (counts["accepted"], counts["version"]) == (60, 30)
    assert counts["rejected"] == one["staleness"]["rejected"] + other["staleness"]["rejected"]
    assert learns(one)
    assert learns(other)
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


@pytest.mark.slow
def test_two_trainers_go_on_with_new_servers(tmp_path):
    options = {"checkpoints": str(tmp_path), "mode": "async", "staleness": 2}
    with serving(2) as addresses:
        before = run(2, "async_programs:together", steps=20, servers=addresses, **options)
    with serving(1) as addresses:
        one, other = run(2, "async_programs:together", steps=60, servers=addresses, **options)
    assert [len(each["losses"]) for each in (one, other)] == [40, 40]
    assert one["told"][0]["1"]["version"] == 80
    for after, earlier in zip((one, other), before, strict=True):
        assert np.mean(after["losses"]) < np.mean(earlier["losses"])
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def hello(**more):
    usual = {"trainer": 0, "trainers": 2, "run": "r", "mode": "async", "generation": 0}
    return {**usual, "server": 0, "servers": 1, **more}


class Lines:
    """`Servers` of one address, with a hello of one's own."""

    def __init__(self, address, **more):
        self.one = Client("server", address, hello=hello(**more), deadline=20)

    def peer(self, server, line):
        return self.one


def test_a_model_stays_until_a_new_generation():
    with contextlib.closing(Registry()) as registry, serving(1, registry=registry.address) as (address,):
        first, second = (
            DenseServerProxy(Lines(address), 0, 1),
            DenseServerProxy(Lines(address, trainer=1), 0, 1),
        )
        start_with(first, {"w": torch.zeros(2)})
        assert first.push_gradients({"w": torch.ones(2)}, 0, trainer="a", sequence=0).version == 1
        version, parameters = second.pull()
        assert (version, parameters["w"].tolist()) == (1, [-0.5, -0.5])
        assert second.pull(1) == (1, None)
        assert first.next_sequence("a") == 1
        start_with(DenseServerProxy(Lines(address), 0, 2), {"other": torch.ones(3)})
        again = DenseServerProxy(Lines(address, run="another", dense={"grads_to_wait": 2}), 0, 1)
        assert again.push_gradients({"w": torch.ones(2)}, 1, trainer="a", sequence=1).version == 1
        assert again.flush() == 2
        registry.begin_generation(1)
        anew = DenseServerProxy(Lines(address, run="anew", generation=1), 0, 1)
        with pytest.raises(RuntimeError, match="expected load_state first"):
            anew.pull()
        with pytest.raises(RefusedError, match="older"):
            again.pull()


def test_trainers_must_agree_on_what_makes_a_step():
    with serving(1) as (address,):
        Lines(address, dense={"grads_to_wait": 2, "tolerance": 1}).one.call("describe")
        with pytest.raises(RefusedError, match=r"grads_to_wait=2, tolerance=1, .* as the first trainer said"):
            Lines(address, trainer=1).one.call("describe")
        with pytest.raises(RefusedError, match=r"to be a whole number from 1 .*, got 0"):
            Lines(address, trainer=1, dense={"grads_to_wait": 0}).one.call("describe")
        with pytest.raises(RefusedError, match=r"'pull_every'\] to be a whole number from 1 "):
            Lines(address, trainer=1, dense={"pull_every": 0}).one.call("describe")
        with pytest.raises(RefusedError, match=r"pull_every=1, as the first .* pull_every=2"):
            Lines(address, trainer=1, dense={"grads_to_wait": 2, "tolerance": 1, "pull_every": 2}).one.call(
                "describe"
            )


FLOATS = np.zeros(2, np.float32)
PUSH = {"version": 0, "trainer": "a", "sequence": 0, "lr": None}
MALFORMED = {
    "no tensors": ("push_dense", PUSH, [], "with 'tensors'"),
    "no array": ("push_dense", {**PUSH, "tensors": [["w", [2]]]}, [], "expected 1 arrays"),
    "another size": ("push_dense", {**PUSH, "tensors": [["w", [3]]]}, [FLOATS], "got float32"),
    "no shape": ("push_dense", {**PUSH, "tensors": [["w", [-1]]]}, [FLOATS], "got -1"),
    "a name twice": ("push_dense", {**PUSH, "tensors": [["w", [1]], ["w", [1]]]}, [FLOATS], "'w' twice"),
    "integers": ("push_dense", {**PUSH, "tensors": [["w", [2]]]}, [FLOATS.astype(int)], "float32"),
    "no model": ("pull_dense", {"model": -1, "version": None}, [], "expected model to be a whole number"),
    "no version": ("pull_dense", {"version": "new"}, [], "expected version to be a whole number"),
    "no trainer": (
        "push_dense",
        {**PUSH, "trainer": 7, "tensors": [["w", [2]]]},
        [FLOATS],
        "expected trainer to be text",
    ),
    "no state": ("load_dense_state", {}, [], "expected 1 arrays"),
    "bytes of no state": (
        "load_dense_state",
        {},
        [np.arange(40, dtype=np.uint8)],
        "bytes that cannot be read",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_are_refused_and_change_nothing(name):
    method, head, arrays, message = MALFORMED[name]
    with serving(1) as (address,):
        lines = Lines(address)
        dense = DenseServerProxy(lines, 0, 1)
        start_with(dense, {"w": torch.ones(2)})
        with pytest.raises(RefusedError, match=message):
            lines.one.call(method, {"model": 1, **head}, arrays)
        assert dense.pull()[1]["w"].tolist() == [1, 1]


def test_a_state_that_cannot_be_used_is_refused():
    with serving(1) as (address,):
        dense = DenseServerProxy(Lines(address), 0, 1)
        start_with(dense, {"w": torch.ones(2)})
        state = dense.state()
        for wrong in ({"version": -1}, {"slots": {"v": {}}}, {"optimizer": {"name": "Mine", "options": {}}}):
            with pytest.raises(RefusedError, match="cannot be used"):
                dense.load_state({**state, **wrong})
        dense.load_state({**state, "version": 7})
        assert dense.pull(7) == (7, None)


WRONG = {
    "no mode": ({"mode": "eager"}, "mode must be one of sync, hybrid, async, got 'eager'"),
    "a stale sync": ({"mode": "sync", "staleness": 2}, "mode sync has staleness 1, got 2"),
    "options of another mode": ({"grads_to_wait": 2}, "grads_to_wait is for mode async, got mode sync"),
    "no gradients": ({"mode": "async", "grads_to_wait": 0}, "grads_to_wait must be at least 1"),
    "less than none": ({"mode": "async", "tolerance": -1}, "tolerance must not be negative"),
    "two ways": ({"mode": "async", "lr_staleness": True, "tolerance": 1}, "one or the other"),
    "pulls of another mode": (
        {"mode": "hybrid", "pull_every": 2},
        "pull_every is for mode async, got mode hy",
    ),
    "pulls of no mode": ({"pull_every": 1}, "pull_every is for mode async, got mode sync"),
    "no pulls": ({"mode": "async", "pull_every": 0}, "a whole number from 1 on, got 0"),
    "half a pull": ({"mode": "async", "pull_every": 1.5}, "an integer as pull_every, got 1.5"),
    "no servers to pull from": ({"kind": "sharded", "pull_every": 2}, 'for connect\\("remote"\\)'),
    "no servers": ({"kind": "sharded", "mode": "async"}, 'for connect\\("remote"\\)'),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(name):
    options, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        distributed.connect(**{"kind": "remote", "servers": ["127.0.0.1:1"], **options})


def test_modes_come_from_the_program_the_job_or_the_staleness():
    job = {
        "KARVAN_MODE": "async",
        "KARVAN_STALENESS": "3",
        "KARVAN_GRADS_TO_WAIT": "2",
        "KARVAN_PULL_EVERY": "5",
    }
    assert choose_mode(None, None, {}) == (SYNC, 1)
    assert choose_mode(None, 2, {}) == (HYBRID, 2)
    assert choose_mode("async", None, {}) == (ASYNC, 4)
    assert choose_mode("hybrid", 1, {}) == (HYBRID, 1)
    assert choose_mode(None, None, job) == (ASYNC, 3)
    assert choose_mode("sync", None, job) == (SYNC, 1)
    assert choose_dense(ASYNC, None, None, None, None, job) == DenseSettings(grads_to_wait=2, pull_every=5)
    assert choose_dense(ASYNC, True, None, None, None, job) == DenseSettings(True, pull_every=5)
    assert choose_dense(ASYNC, None, None, None, 3, job) == DenseSettings(grads_to_wait=2, pull_every=3)
    assert choose_dense(ASYNC, None, None, None, None, {}).pull_every == 1
    assert choose_dense(HYBRID, None, None, None, None, job) == DenseSettings()


def test_optimizers_and_steps_that_servers_cannot_make_are_refused():
    with connected(1):
        with pytest.raises(ValueError, match="param groups that share"):
            trainer_of(
                dense=lambda p: torch.optim.SGD(
                    [{"params": [each], "lr": 1.0 + n} for n, each in enumerate(p)]
                )
            )
        with pytest.raises(ValueError, match="A server can run one of"):
            trainer_of(dense=lambda p: torch.optim.LBFGS(p))
        rows = kv.Trainer(
            trainer_of().model,
            loss,
            sparse_optimizer=None,
            frozen=["user", "item"],
            dense_optimizer=OPTIMIZERS["sgd"],
            progress="none",
        )
        assert rows.fit(batches(2)).step == 2
