"""Mistakes and kills around evaluations, schedules and averages: nothing that was trained is lost."""

import copy

import polars as pl
import pytest
import torch
from train_helpers import batches, loader, model, newest, records, trainer

import karvan as kv


@pytest.mark.parametrize("scheduler", ["cosine", 3])
def test_a_scheduler_that_is_no_function_is_an_error_that_shows_one(scheduler):
    with pytest.raises(TypeError, match=r"scheduler expects a function of an optimizer .* got"):
        trainer(model(), scheduler=scheduler)


def test_a_list_of_schedulers_that_contains_itself_is_an_error():
    listed = []
    listed.append(listed)
    with pytest.raises(TypeError, match="got a list within a list"):
        trainer(model(), scheduler=listed)


WRONG = {
    "no label": lambda batch: {name: value for name, value in batch.items() if name != "label"},
    "other features": lambda batch: {"label": batch["label"]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_in_the_first_evaluation_batch_is_an_error_before_training(kind):
    net = model()
    fit = trainer(net)
    with pytest.raises((KeyError, ValueError, TypeError)):
        fit.fit(batches(), eval_data=[WRONG[kind](batch) for batch in batches(2)])
    assert (fit.step, net.embeddings.step) == (0, 0)


def test_the_first_evaluation_batch_is_tried_without_losing_it():
    data = loader()
    result = trainer(model()).fit(batches(3), eval_data=data)
    again = trainer(model())
    again.fit(batches(3))
    assert again.evaluate(loader()) == result.evaluation


def test_a_batch_that_was_looked_at_is_trained_evaluated_and_predicted():
    looked_at = loader()
    next(iter(looked_at))
    first = trainer(model())
    result = first.fit(looked_at, eval_data=looked_at)
    again = trainer(model())
    expected = again.fit(loader(), eval_data=loader())
    assert result.samples == expected.samples
    for trained, plain in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(trained, plain)
    # It is evaluated in the order of its next epoch, and float32 sums depend on the order.
    assert result.evaluation == pytest.approx(expected.evaluation, rel=1e-6)
    next(iter(looked_at))
    assert again.evaluate(looked_at) == pytest.approx(expected.evaluation, rel=1e-6)
    next(iter(looked_at))
    assert sum(len(output) for output, _ in again.predict(looked_at)) == expected.samples


def test_data_that_was_moved_to_a_position_is_trained_from_there():
    moved = loader()
    next(iter(moved))
    moved.load_state_dict(moved.state_dict())
    whole = sum(batch.samples for batch in loader())
    assert trainer(model()).fit(moved).samples == whole - 16


class Fails:
    """Batches of evaluation that fail at the second one, until they are mended."""

    mended = False

    def __iter__(self):
        yield batches(1, seed=5)[0]
        if not self.mended:
            raise OSError("the second file is gone")


@pytest.mark.parametrize("eval_every", [None, 4])
@pytest.mark.parametrize("data", [batches, loader])
def test_a_failed_evaluation_loses_no_training_and_is_made_first_by_the_next_fit(tmp_path, eval_every, data):
    def run(folder, evaluated, net, seen):
        class Seen(kv.callbacks.Callback):
            def on_evaluate_end(self, trainer, metrics):
                seen.append((trainer.step, metrics["loss"]))

        fit = trainer(
            net,
            checkpoints=tmp_path / folder,
            callbacks=[Seen(), kv.callbacks.EarlyStopping("loss", patience=100, mode="min")],
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
            schedule_per="epoch",
        )
        return fit.fit(data(), epochs=2, eval_data=evaluated, eval_every=eval_every)

    straight, whole = model(), []
    mended = Fails()
    mended.mended = True
    run("straight", mended, straight, whole)
    failing, net, seen = Fails(), model(), []
    with pytest.raises(OSError, match="second file"):
        run("failing", failing, net, seen)
    assert kv.Checkpoints(tmp_path / "failing").latest().step == whole[0][0]
    failing.mended = True
    net = model()
    run("failing", failing, net, seen)
    assert seen == whole
    assert newest(tmp_path / "failing") == newest(tmp_path / "straight")


def test_another_net_on_resume_is_an_error_that_names_the_parameter_and_both_shapes(tmp_path):
    trainer(model(), checkpoints=tmp_path).fit(batches(2))
    other = model()
    other.last = torch.nn.Linear(other.last.in_features, 3)
    with pytest.raises(ValueError, match=r"'last.weight' has shape \(3, .*step-0000.*warm_start"):
        trainer(other, checkpoints=tmp_path).fit(batches(2), epochs=2)
    with pytest.raises(ValueError, match=r"'last.weight' has shape \(3, .*step-0000.*warm_start"):
        trainer(other).load(tmp_path)


def test_a_model_of_half_precision_says_what_to_do():
    with pytest.raises(TypeError, match="expected a model of float32, with precision='bf16'"):
        trainer(model().half()).fit(batches(2))


def test_a_lazy_frame_is_to_be_collected():
    lazy = pl.DataFrame({name: column.numpy() for name, column in records(4).items()}).lazy()
    for call in (lambda: trainer(model()).fit(lazy), lambda: kv.data.read(lazy, 4)):
        with pytest.raises(TypeError, match=r"frame\.collect\(\)"):
            call()


def test_a_copy_of_a_model_with_an_engine_says_how_to_make_one():
    with pytest.raises(TypeError, match=r"state_dict\(rows=True\)"):
        copy.deepcopy(model())


# Schedules by evaluations


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=9, threshold_mode="abs"
    )


def test_reduce_lr_on_plateau_follows_the_loss_of_evaluations(tmp_path):
    fit = trainer(model(), scheduler=plateau, checkpoints=tmp_path)
    before = [group["lr"] for each in fit.update.optimizers.values() for group in each.param_groups]
    fit.fit(batches(8), eval_data=batches(2, seed=5), eval_every=2)
    after = [group["lr"] for each in fit.update.optimizers.values() for group in each.param_groups]
    assert after == [lr * 0.5**3 for lr in before]  # the first of four evaluations is the best


def test_reduce_lr_on_plateau_without_evaluations_is_an_error():
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs 'loss' of evaluations"):
        trainer(model(), scheduler=plateau).fit(batches(2))


def test_eval_every_of_a_trainer_holds_for_its_fits():
    seen = []

    class Seen(kv.callbacks.Callback):
        def on_evaluate_end(self, trainer, metrics):
            seen.append(trainer.step)

    fit = trainer(model(), eval_every=3, callbacks=[Seen()])
    fit.fit(batches(6), eval_data=batches(1))
    fit.fit(batches(4), eval_data=batches(1), eval_every=2)
    assert seen == [3, 6, 8, 10]
    with pytest.raises(ValueError, match="eval_every must be at least 1"):
        trainer(model(), eval_every=0)


# Averages


def test_averages_are_those_of_torch_and_are_what_is_evaluated_and_predicted(tmp_path):
    ema = kv.train.EMA(0.8)

    class Torch(kv.callbacks.Callback):
        averaged = None

        def on_step_end(self, trainer, logs):
            if self.averaged is None:
                self.averaged = torch.optim.swa_utils.AveragedModel(
                    trainer.model.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
                )
            self.averaged.update_parameters(trainer.model.net)

    theirs, net = Torch(), model()
    fit = trainer(net, callbacks=[ema, theirs], checkpoints=tmp_path)
    result = fit.fit(batches(8), eval_data=batches(2, seed=5))
    with ema.averaged(net):
        for own, other in zip(net.net.parameters(), theirs.averaged.module.parameters(), strict=True):
            torch.testing.assert_close(own, other)
    assert result.evaluation == fit.evaluate(batches(2, seed=5))
    assert result.evaluation != trainer(net).evaluate(batches(2, seed=5))
    other = trainer(model(), callbacks=[kv.train.EMA(0.8)])
    other.load(tmp_path)
    assert other.evaluate(batches(2, seed=5)) == result.evaluation
    for (mine, _), (its, _) in zip(fit.predict(batches(2)), other.predict(batches(2)), strict=True):
        assert torch.equal(mine, its)
    ema.copy_to(net)
    assert trainer(net).evaluate(batches(2, seed=5)) == result.evaluation


def test_steps_that_were_skipped_are_in_no_average():
    ema, data = kv.train.EMA(0.5), batches(3)
    data[0] = kv.Batch({**data[0], "price": torch.full((16,), torch.inf)})
    fit = trainer(model(), callbacks=[ema])
    fit.fit(data[:2])
    first = fit.model.last.bias.detach().clone()
    assert torch.equal(ema.state_dict()["last.bias"], first)
    fit.fit(data[2:], data_name="more")
    torch.testing.assert_close(ema.state_dict()["last.bias"], (first + fit.model.last.bias.detach()) / 2)


def test_averages_resume_with_the_same_bits(tmp_path):
    def run(folder, steps):
        fit = trainer(model(), callbacks=[kv.train.EMA(0.9)], checkpoints=tmp_path / folder)
        return fit.fit(batches(8), max_steps=steps, eval_data=batches(2, seed=5))

    straight = run("straight", 8)
    run("stopped", 3)
    assert run("stopped", 8).evaluation == straight.evaluation
    assert newest(tmp_path / "stopped") == newest(tmp_path / "straight")


def test_averages_that_cannot_be_computed_are_an_error():
    with pytest.raises(ValueError, match="average_every=3 ranks have different parameters"):
        trainer(model(), callbacks=[kv.train.EMA()], average_every=3)
    with pytest.raises(ValueError, match="at most one EMA, got 2"):
        trainer(model(), callbacks=[kv.train.EMA(), kv.train.EMA(0.5)])
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
        kv.train.EMA(1.0)
