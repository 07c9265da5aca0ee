"""Going on from a checkpoint: as if training had never stopped, bit for bit."""

import math
import tempfile

import pytest
import torch
from few_examples import few_examples
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import StopAt, assert_same, batches, loader, model, newest, trainer

import karvan as kv


def torch_loader():
    """Shuffled by the global generator, and without a position."""
    return torch.utils.data.DataLoader(batches(), batch_size=None, shuffle=True)


DATA = {"list": batches, "loader": loader, "torch": torch_loader}


def run(folder, data, net=None, stop_at=None, resume=True, epochs=3, max_steps=None, **options):
    """A fit with everything that has state."""
    net = net or model()
    fit = trainer(
        net,
        metrics={"auc": kv.metrics.AUC()},
        scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 9, 20], gamma=0.5),
        callbacks=[kv.callbacks.EarlyStopping("loss", patience=100, mode="min"), StopAt(stop_at)],
        checkpoints=kv.Checkpoints(folder),
        log_every=7,
        **options,
    )
    result = fit.fit(
        DATA[data](),
        epochs=epochs,
        max_steps=max_steps,
        eval_data=batches(3, seed=5),
        eval_every=5,
        resume=resume,
    )
    return net, result


@few_examples(5, thorough=8)
@given(
    data=st.sampled_from(sorted(DATA)),
    stops=st.lists(st.integers(1, 35), min_size=1, max_size=3, unique=True).map(sorted),
    accumulate=st.integers(1, 5),
    ahead=st.sampled_from([0, 2]),
    every=st.none() | st.integers(1, 12),
)
def test_a_fit_that_was_stopped_anywhere_ends_like_one_that_was_not(data, stops, accumulate, ahead, every):
    with tempfile.TemporaryDirectory() as straight, tempfile.TemporaryDirectory() as stopped:
        expected, whole = run(straight, data, gradient_accumulation_steps=accumulate)
        options = {"gradient_accumulation_steps": accumulate, "prefetch": ahead, "checkpoint_every": every}
        for stop in stops:
            run(stopped, data, stop_at=stop, **options)
            torch.manual_seed(12345)  # a new process has other random numbers
        net, result = run(stopped, data, **options)
        assert (result.step, result.epoch) == (whole.step, whole.epoch) == (3 * math.ceil(12 / accumulate), 3)
        assert_same(net, expected)
        assert newest(stopped) == newest(straight)


def test_a_finished_fit_trains_nothing_more_and_says_so(tmp_path, capfd):
    net, first = run(tmp_path, "loader")
    before = newest(tmp_path)
    again, result = run(tmp_path, "loader", progress="plain")
    assert (result.trained, result.step, result.stopped) == (0, first.step, None)
    assert result.evaluation == first.evaluation
    assert newest(tmp_path) == before
    assert_same(net, again)
    assert "Trained up to step 36 already, nothing more to do" in capfd.readouterr().err


@pytest.mark.parametrize("data", DATA)
def test_a_finished_fit_goes_on_when_more_is_asked_for(tmp_path, data):
    expected, _ = run(tmp_path / "straight", data, epochs=3)
    run(tmp_path / "parts", data, epochs=1)
    torch.manual_seed(99)
    net, result = run(tmp_path / "parts", data, epochs=3)
    assert (result.trained, result.epoch) == (24, 3)
    assert_same(net, expected)
    assert newest(tmp_path / "parts") == newest(tmp_path / "straight")


def test_steps_count_over_epochs_and_resumes(tmp_path):
    expected, _ = run(tmp_path / "straight", "loader", epochs=None, max_steps=31)
    run(tmp_path / "parts", "loader", epochs=None, max_steps=17)
    net, result = run(tmp_path / "parts", "loader", epochs=None, max_steps=31)
    assert (result.trained, result.step) == (14, 31)
    assert_same(net, expected)


def test_a_fit_from_scratch_refuses_a_folder_with_checkpoints(tmp_path):
    run(tmp_path, "list", epochs=1)
    with pytest.raises(ValueError, match="has checkpoints up to step 12: expected a folder without"):
        run(tmp_path, "list", resume=False)
    run(tmp_path / "fresh", "list", resume=False)


def test_data_that_is_shorter_than_what_was_trained_is_an_error(tmp_path):
    trainer(checkpoints=tmp_path, callbacks=[StopAt(8)]).fit(batches())
    fit = trainer(checkpoints=tmp_path)
    with pytest.raises(ValueError, match="has trained 8 batches before, and the data must give them again"):
        fit.fit(batches(5))


def test_a_path_is_enough_and_every_n_steps_means_that(tmp_path):
    saved = []

    class Watch(kv.callbacks.Callback):
        def on_checkpoint(self, trainer, step):
            saved.append(step)

    fit = trainer(checkpoints=tmp_path, checkpoint_every=5, callbacks=[Watch()])
    result = fit.fit(batches())
    assert saved == [5, 10, 12]
    assert result.checkpoint == str(tmp_path / "step-000000000012")
    assert [c.step for c in kv.Checkpoints(tmp_path).list()] == [5, 10, 12]


def test_a_fit_goes_on_where_an_old_checkpoint_cannot_be_removed(tmp_path, caplog):
    def fit(steps):
        checkpoints = kv.Checkpoints(tmp_path, keep_last=1)
        return trainer(checkpoints=checkpoints, checkpoint_every=2).fit(batches(), max_steps=steps)

    fit(2)
    stuck = tmp_path / f"step-{2:0250d}"  # with the name it would be hidden by it is too long for any disk
    (tmp_path / "step-000000000002").rename(stuck)
    assert fit(8).trained == 6
    assert len(caplog.records) == 3
    assert all(f"{stuck} could not be removed" in record.message for record in caplog.records)
    assert [one.step for one in kv.Checkpoints(tmp_path).list()] == [2, 8]


def test_checkpoints_by_time(tmp_path):
    now = [0.0]
    saved = []

    class Watch(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            now[0] += 1.0

        def on_checkpoint(self, trainer, step):
            saved.append(step)

    fit = trainer(checkpoints=tmp_path, checkpoint_seconds=3.5, callbacks=[Watch()])
    fit.saver._clock = lambda: now[0]
    fit.fit(batches())
    assert saved == [4, 8, 12, 12]  # the last one again, when the epoch had ended


def test_the_best_checkpoint_is_the_one_that_was_evaluated(tmp_path):
    scores = iter([0.3, 0.9, 0.5, 0.4])
    checkpoints = kv.Checkpoints(tmp_path, keep_last=1, keep_best=("score", "max"))
    net = model()
    fit = trainer(net, checkpoints=checkpoints, checkpoint_every=2)
    models = {}
    fit.evaluate = lambda data: models.update({fit.step: net.last.weight.clone()}) or {"score": next(scores)}
    fit.fit(batches(), eval_data=batches(1), eval_every=3)
    best = checkpoints.best()
    assert (best.step, best.metrics) == (6, {"score": 0.9})
    assert torch.equal(best.state()["model"]["last.weight"], models[6])
    assert [c.step for c in checkpoints.list()] == [6, 12]


def test_a_model_trains_on_after_its_checkpoint_was_taken(tmp_path):
    """The checkpoint of a step has that step's rows, though later steps ran while it was written."""
    expected, _ = run(tmp_path / "five", "list", epochs=None, max_steps=5)
    run(tmp_path / "all", "list", epochs=1, checkpoint_every=5)
    (early,) = [c for c in kv.Checkpoints(tmp_path / "all").list() if c.step == 5]
    net = model()
    trainer(net)
    net.load_state_dict(early.load(net)["model"])
    assert_same(net, expected)


def test_early_stopping_survives_a_resume_and_stays_stopped(tmp_path):
    def fit(stop_at=None):
        scores = {2: 0.5, 4: 0.6, 6: 0.55, 8: 0.6, 10: 0.7}
        made = trainer(
            checkpoints=tmp_path,
            callbacks=[kv.callbacks.EarlyStopping("score", patience=2), StopAt(stop_at)],
        )
        made.evaluate = lambda data: {"score": scores[made.step]}
        return made.fit(batches(), eval_data=batches(1), eval_every=2)

    assert fit(stop_at=7).step == 7
    second = fit()
    assert (second.step, second.trained) == (8, 1)
    assert second.stopped == "early: score was best at 0.6, 2 evaluations ago"
    third = fit()
    assert (third.step, third.trained) == (8, 0)
