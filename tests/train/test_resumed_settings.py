"""Settings of optimizers that differ from the checkpoint's, and models that were not loaded."""

import logging

import pytest
import torch

import karvan as kv
from karvan.distributed import Connection


def data(rows=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return kv.data.read(
        {
            "user": torch.randint(20, (rows,), generator=generator),
            "price": torch.rand(rows, generator=generator),
            "label": torch.randint(2, (rows,), generator=generator).float(),
        },
        16,
    )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = kv.EmbeddingEngine({"user": kv.Table(4)})
        self.net = torch.nn.Linear(5, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.net(torch.cat([vectors["user"], batch["price"].unsqueeze(1)], 1)).squeeze(1)


def trainer(folder, dense=lambda p: torch.optim.Adam(p, lr=1e-3), sparse=None, **options):
    return kv.Trainer(
        Model(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=dense,
        sparse_optimizer=sparse or kv.optim.Adagrad(lr=0.05),
        checkpoints=folder,
        progress="none",
        **options,
    )


def rates(made):
    return {name: each.param_groups[0]["lr"] for name, each in made.update.optimizers.items()}


def test_settings_that_the_checkpoint_replaces_are_named(tmp_path, caplog):
    trainer(tmp_path).fit(data(), max_steps=2)
    trainer(tmp_path).fit(data(), max_steps=3)
    assert not caplog.records
    again = trainer(
        tmp_path,
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.9)),
        kv.optim.Adagrad(lr=0.5),
    )
    again.fit(data(), max_steps=4)
    assert rates(again) == {"dense": 1e-3, "sparse": 0.05}
    dense, sparse = (record.getMessage() for record in caplog.records)
    assert "lr=0.001 (given: 0.01), betas=(0.9, 0.999) (given: (0.5, 0.9))" in dense
    assert "Adagrad, continues with the checkpoint's settings: lr=0.05 (given: 0.5)" in sparse
    assert "new_settings=True" in dense


def test_new_settings_are_taken_on_demand_and_the_state_stays(tmp_path, caplog):
    trainer(tmp_path).fit(data(), max_steps=2)
    again = trainer(tmp_path, lambda p: torch.optim.Adam(p, lr=0.01), kv.optim.Adagrad(lr=0.5))
    again.fit(data(), max_steps=3, new_settings=True)
    assert rates(again) == {"dense": 0.01, "sparse": 0.5}
    assert next(iter(again.update.optimizers["dense"].state.values()))["step"] == 3
    assert not caplog.records


def test_a_schedule_continues_from_a_new_rate(tmp_path, caplog):
    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    trainer(tmp_path, scheduler=halving).fit(data(), max_steps=2)
    same = trainer(tmp_path, scheduler=halving)
    same.fit(data(), max_steps=3)
    assert rates(same)["sparse"] == pytest.approx(0.05 / 8)
    assert not caplog.records
    other = trainer(tmp_path, sparse=kv.optim.Adagrad(lr=0.5), scheduler=halving)
    other.fit(data(), max_steps=4, new_settings=True)
    assert rates(other)["sparse"] == pytest.approx(0.5 / 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dense": torch.optim.SGD}, r"is Adam, got SGD.*warm start"),
        ({"dense": torch.optim.AdamW}, r"is Adam, got AdamW"),
        ({"frozen": ["net.bias"]}, r"2 parameters, got one of 1 parameters.*frozen"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_checkpoint_is_refused(tmp_path, change, said):
    trainer(tmp_path).fit(data(), max_steps=2)
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **change).fit(data(), max_steps=3)


def test_evaluating_an_untrained_model_beside_its_checkpoints_is_warned_about(tmp_path, caplog):
    first = trainer(tmp_path)
    first.fit(data(), epochs=5)
    expected = first.evaluate(data(seed=1))
    fresh = trainer(tmp_path)
    fresh.evaluate(data(seed=1))
    assert "trainer.load()" in caplog.text
    caplog.clear()
    assert fresh.load().step == first.step
    assert fresh.evaluate(data(seed=1)) == expected
    assert [len(output) for output, _ in fresh.predict(data(seed=1))] == [16] * 4
    assert not caplog.records
    with pytest.raises(ValueError, match="there is none"):
        trainer(tmp_path / "empty").load()


def test_a_loaded_trainer_gives_features_of_the_data_their_statistics(tmp_path, caplog):
    caplog.set_level(logging.WARNING)

    def engine():
        return kv.FeatureEngine([kv.Feature("price").normalise()])

    def scaled(features, seed=0):
        loader = data(seed=seed)
        return kv.data.read(loader._settings.source, 16, transform=features)

    fitted = engine().fit(data())
    first = trainer(tmp_path)
    first.fit(scaled(fitted), epochs=2)
    fresh = trainer(tmp_path)
    fresh.load()
    assert fresh.evaluate(scaled(engine(), 1)) == first.evaluate(scaled(fitted, 1))


@pytest.mark.parametrize(
    ("variables", "call"),
    [
        ({"KARVAN_ROLE": "trainer", "KARVAN_PARAMETER_SERVER_COUNT": "2"}, "remote"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sharded"),
    ],
)
def test_a_program_of_several_processes_that_did_not_connect_is_refused(monkeypatch, variables, call):
    monkeypatch.setattr("karvan.distributed.connection._current", Connection())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf'kv\.connect\("{call}"\).*kv\.connect\("memory"\)'):
        trainer(None).fit(data())
    kv.connect("memory")
    assert trainer(None).fit(data()).step == 4
