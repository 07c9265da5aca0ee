"""What is wrong before training begins is an error then, which names it and says what to do."""

import resource
import traceback

import pytest
import torch
from torch import nn
from train_helpers import batches, everything, model, trainer

import karvan as kv
from karvan import distributed
from karvan.store import MemoryStore
from karvan.train.optimizer_step import Frozen


def changed(net, before):
    """The names of parameters, and of tables whose rows learn, that a fit has changed."""
    after = everything(net)
    return {
        name.removesuffix(".vectors")
        for name, value in after.items()
        if not name.endswith((".keys", ".state", ".counts", ".last_steps"))
        and not (name in before and torch.equal(before[name], value))
    }


def seen(net):
    """Inserts all rows that the batches of a test need, so that only learning changes them."""
    net.train()
    for batch in batches(3):
        net(batch)
    return copied(net)


def copied(net):
    return {name: value.clone() for name, value in everything(net).items()}


def context(net, **options):
    with kv.TrainContext(net, **options):
        pass


HALVES = [
    ({"sparse_optimizer": None}, r"tables would not be trained.*no sparse_optimizer: user, item\."),
    ({"dense_optimizer": None}, r"parameters would not be trained.*no dense_optimizer: net\.0\.weight, net"),
    ({"sparse_optimizer": None, "dense_optimizer": None}, "dense_optimizer or a sparse_optimizer, got nei"),
]


@pytest.mark.parametrize(("options", "says"), HALVES)
def test_a_half_without_an_optimizer_is_an_error_before_the_first_step(options, says):
    net = model()
    fit = trainer(net, **options)
    before = copied(net)
    with pytest.raises(ValueError, match=says):
        fit.fit(batches(3))
    assert changed(net, before) == set()
    assert net.embeddings.step == 0


@pytest.mark.parametrize(("options", "says"), HALVES)
def test_a_train_context_says_the_same(options, says):
    given = {"dense_optimizer": torch.optim.Adam, "sparse_optimizer": kv.optim.Adagrad(lr=0.1)} | options
    with pytest.raises(ValueError, match=says):
        context(model(), **given)


def test_a_dense_optimizer_of_some_parameters_is_an_error_that_names_the_others():
    net = model()
    with pytest.raises(ValueError, match=r"does not have them: last\.weight, last\.bias\..*frozen="):
        trainer(net, dense_optimizer=torch.optim.Adam(net.net.parameters())).fit(batches(2))


def test_a_dense_optimizer_of_another_model_is_an_error():
    with pytest.raises(ValueError, match=r"does not have them: net\.0\.weight"):
        trainer(model(), dense_optimizer=torch.optim.Adam(model().parameters())).fit(batches(2))


def test_a_sparse_optimizer_of_one_of_two_engines_is_an_error_that_names_the_other_tables():
    net = model()
    net.second = kv.EmbeddingEngine({"user": kv.Table(4, name="second_user")})
    with pytest.raises(ValueError, match=r"attached to others: second_user\..*frozen=\[\"second_user\"\]"):
        trainer(net, sparse_optimizer=kv.optim.SGD(net.embeddings, lr=0.1)).fit(batches(2))


def test_a_trainer_without_optimizers_evaluates_and_predicts():
    net = model()
    trainer(net).fit(batches(3))
    quiet = trainer(net, dense_optimizer=None, sparse_optimizer=None)
    assert quiet.evaluate(batches(2)) == trainer(net).evaluate(batches(2))
    assert len(list(quiet.predict(batches(2)))) == 2


@pytest.mark.parametrize(
    ("frozen", "stays"),
    [
        ("user", {"user"}),
        (["item", "net"], {"item", "net.0.weight", "net.0.bias"}),
        (["*.bias"], {"net.0.bias", "last.bias"}),
        (["last.weight"], {"last.weight"}),
    ],
)
def test_what_is_frozen_stays_and_all_else_is_trained(frozen, stays):
    net = model()
    before = seen(net)
    result = trainer(net, frozen=frozen).fit(batches(3))
    every = {"user", "item", "net.0.weight", "net.0.bias", "last.weight", "last.bias"}
    assert result.trained == 3
    assert changed(net, before) == every - stays
    other = model()
    seen(other)
    with kv.TrainContext(
        other,
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        frozen=frozen,
    ) as ctx:
        for batch in ctx.loader(batches(3)):
            output, labels = ctx.forward(batch)
            ctx.backward(nn.functional.binary_cross_entropy_with_logits(output, labels))
    assert changed(other, before) == every - stays


class Towers(nn.Module):
    """Two modules that each hold an engine and a net; `again` is a second name of the first."""

    def __init__(self):
        super().__init__()
        self.users, self.items = Tower("user"), Tower("item")
        self.again = self.users

    def forward(self, batch):
        return self.users(batch) + self.items(batch)


class Tower(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.emb, self.net = name, kv.EmbeddingEngine({name: kv.Table(4)}), nn.Linear(4, 1)

    def forward(self, batch):
        return self.net(self.emb(batch)[self.name]).squeeze(1)


@pytest.mark.parametrize(
    ("frozen", "tables", "parameters"),
    [
        ("users", ["user"], ["users.net.weight", "users.net.bias"]),
        ("again", ["user"], ["users.net.weight", "users.net.bias"]),
        ("user?", ["user"], ["users.net.weight", "users.net.bias"]),
        ("users.emb", ["user"], []),
        ("users.emb.user", ["user"], []),
        ("*.net", [], ["users.net.weight", "users.net.bias", "items.net.weight", "items.net.bias"]),
        ("*.emb", ["user", "item"], []),
    ],
)
def test_the_name_of_a_module_stands_for_the_tables_and_parameters_in_it(frozen, tables, parameters):
    found = Frozen(Towers(), frozen)
    assert [table.name for table in found.tables] == tables
    assert list(found.parameters) == parameters


def test_rows_of_an_engine_inside_a_frozen_module_stay_as_they_are():
    net, keys = Towers(), torch.arange(40)
    trainer(net).fit(batches(2))
    before = [
        tower.emb(kv.Batch({tower.name: keys}))[tower.name].detach() for tower in (net.users, net.items)
    ]
    trainer(net, frozen=["users"]).fit(batches(3))
    net.eval()
    after = [tower.emb(kv.Batch({tower.name: keys}))[tower.name].detach() for tower in (net.users, net.items)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_gradients_of_what_is_frozen_do_not_pile_up():
    net = model()
    trainer(net).fit(batches(3))  # gives every table an optimizer, so that gradients wait for one
    trainer(net, frozen=["user", "net"]).fit(batches(3))
    assert net.net[0].weight.grad is None
    assert net.embeddings.gradients(net.embeddings.tables()) == []


def test_requires_grad_and_read_only_tables_need_no_optimizer():
    net = model()
    net.requires_grad_(False)
    trainer(net, dense_optimizer=None).fit(batches(2))
    other = nn.Sequential(kv.EmbeddingEngine({"user": kv.Table(1, admit=kv.admission.ReadOnly())}), Add())
    assert trainer(other, sparse_optimizer=None).fit(batches(2)).trained == 2


class Add(nn.Module):
    """The sum of a user's vector and a learned number."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, out):
        return out["user"].squeeze(1) + self.number


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"frozen": "usr"}, ValueError, r"'usr', but the model has no such.*tables are: user, item.*net\.0"),
        ({"frozen": [3]}, TypeError, "names of tables and parameters, got int"),
        (
            {"frozen": ["user", "item"]},
            ValueError,
            "all tables of the model, so the sparse_optimizer has nothing",
        ),
    ],
)
def test_what_frozen_cannot_mean_is_an_error(options, error, says):
    with pytest.raises(error, match=says):
        trainer(**options)


def test_frozen_and_an_optimizer_that_has_it_contradict_each_other():
    net = model()
    with pytest.raises(ValueError, match=r"names last\.weight, last\.bias, but the dense_optimizer has them"):
        trainer(net, frozen="last", dense_optimizer=torch.optim.Adam(net.parameters()))
    with pytest.raises(ValueError, match="names user, but the sparse_optimizer is attached to them"):
        trainer(net, frozen="user", sparse_optimizer=kv.optim.SGD(net, lr=0.1))


@pytest.fixture
def sharded(monkeypatch):
    """A job of one rank that can be connected."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    yield lambda: kv.connect("sharded")
    kv.disconnect()


def test_a_model_made_before_connect_is_refused(sharded):
    net = model()
    sharded()
    says = r'made before kv\.connect\("sharded"\).*\(user, item\).*call kv\.connect\("sharded"\) first'
    with pytest.raises(ValueError, match=says):
        trainer(net)
    with pytest.raises(ValueError, match=says):
        context(net, dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.SGD(lr=0.1))
    # Whoever only looks at rows of this process may do so.
    assert trainer(net, dense_optimizer=None, sparse_optimizer=None).evaluate(batches(1))["loss"] > 0


def test_a_trainer_made_before_connect_is_refused_when_it_fits(sharded):
    made = trainer(model())
    entered = kv.TrainContext(
        model(), dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.SGD(lr=0.1)
    )
    sharded()
    says = r'connection \(kv\.connect\("memory"\)\) than the present one \(kv\.connect\("sharded"\)\)'
    with pytest.raises(ValueError, match=says):
        made.fit(batches(1))
    with pytest.raises(ValueError, match=says), entered:
        pass


def test_a_model_of_a_connection_that_has_ended_is_refused(sharded):
    sharded()
    net = model()
    distributed.disconnect()
    with pytest.raises(ValueError, match=r'connection that has ended \(kv\.connect\("sharded"\)\)'):
        trainer(net)


def test_a_store_of_the_users_own_is_what_the_user_said(sharded):
    net = model()
    mine = MemoryStore()
    net.embeddings = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(8)}, store=mine)
    sharded()
    assert trainer(net).fit(batches(2)).trained == 2


def test_engines_in_memory_may_be_used_after_another_connect_to_memory():
    net = model()
    made = trainer(net)
    kv.connect("memory")
    assert (made.fit(batches(2)).trained, trainer(net).fit(batches(2)).trained) == (2, 2)


class Needs(kv.callbacks.Callback):
    needed_metrics = ("auc", "loss/ctr")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"callbacks": [kv.callbacks.EarlyStopping("auc")]},
            "The callback EarlyStopping needs 'auc' of evaluations",
        ),
        (
            {"callbacks": [Needs()]},
            "The callback Needs needs 'auc' of evaluations, but this fit has no eval_data",
        ),
        (
            {"keep_best": ("auc", "max")},
            "keep_best needs 'auc' of evaluations, but this fit has no eval_data",
        ),
    ],
)
def test_what_needs_evaluations_is_refused_without_data_for_them(tmp_path, options, says):
    if "keep_best" in options:
        options = {"checkpoints": kv.Checkpoints(tmp_path, keep_best=options["keep_best"])}
    with pytest.raises(ValueError, match=says):
        trainer(metrics={"auc": kv.metrics.AUC()}, **options).fit(batches(2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"callbacks": [kv.callbacks.EarlyStopping("aux")]},
            "needs 'aux', but evaluations give: loss, auc. Add it",
        ),
        (
            {"callbacks": [kv.callbacks.EarlyStopping("loss/ctr")]},
            "'loss/ctr', but evaluations give: loss, auc",
        ),
        ({"keep_best": ("logloss", "min")}, "keep_best needs 'logloss', but evaluations give: loss, auc"),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_refused_before_the_first_step(tmp_path, options, says):
    if "keep_best" in options:
        options = {"checkpoints": kv.Checkpoints(tmp_path, keep_best=options["keep_best"])}
    net = model()
    with pytest.raises(ValueError, match=says):
        trainer(net, metrics={"auc": kv.metrics.AUC()}, **options).fit(batches(2), eval_data=batches(1))
    assert net.embeddings.step == 0


def test_metrics_that_evaluations_give_are_fine(tmp_path):
    stopping = kv.callbacks.EarlyStopping("loss/ctr", mode="min", patience=9)
    both = {"metrics": {"auc": kv.metrics.AUC()}, "callbacks": [stopping]}
    each = {"ctr": kv.losses.BinaryCrossEntropy()}
    for loss in (kv.losses.Sum(each), lambda output, batch: {"ctr": each["ctr"](output, batch)}):
        result = trainer(loss=loss, **both).fit(batches(2), eval_data=batches(1))
        assert set(result.evaluation) == {"loss", "loss/ctr", "auc"}
    best = kv.Checkpoints(tmp_path, keep_best=("auc", "max"))
    assert (
        trainer(checkpoints=best, metrics=both["metrics"]).fit(batches(2), eval_data=batches(1)).trained == 2
    )


def folder_of_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize(
    "folder", [folder_of_a_file, lambda path: folder_of_a_file(path) / "run", lambda path: "/proc/karvan/run"]
)
def test_a_folder_that_cannot_be_written_is_noticed_before_the_first_step(tmp_path, folder):
    net, where = model(), folder(tmp_path)
    with pytest.raises(kv.checkpoint.CheckpointError, match="checkpoints cannot be written here: ") as told:
        trainer(net, checkpoints=where).fit(batches(2))
    assert str(where) in str(told.value)
    printed = "".join(traceback.format_exception(told.value))
    assert printed.count("Traceback") == 1
    assert net.embeddings.step == 0


def test_a_folder_that_can_be_written_keeps_nothing_of_the_trial(tmp_path):
    trainer(checkpoints=tmp_path / "new" / "run").fit(batches(2))
    assert [each.name for each in (tmp_path / "new" / "run").glob("*trial*")] == []


def test_a_folder_without_room_is_noticed_before_the_first_step(tmp_path):
    trainer(checkpoints=tmp_path).fit(batches(2))
    there = sorted(each.name for each in tmp_path.iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file of this process may have any bytes
    try:
        with pytest.raises(kv.checkpoint.CheckpointError, match="cannot be written here: File too large"):
            trainer(checkpoints=tmp_path).fit(batches(2), epochs=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(each.name for each in tmp_path.iterdir()) == there


def test_disconnect_is_public_and_ends_the_connection(sharded):
    sharded()
    assert distributed.current().settings.kind == "sharded"
    kv.disconnect()
    assert distributed.current().settings.kind == "memory"
