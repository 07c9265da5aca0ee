"""Tomorrow's data: a run that has finished one day's data continues on the next day's, in the same folder."""

import signal
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from few_examples import few_examples
from forked_programs import ForkedProgram
from hypothesis import given
from hypothesis import strategies as st
from support_paths import support_path
from train_helpers import StopAt, assert_same, batches, loader, model, newest, records, trainer

import karvan as kv

PROCESS = support_path("train/daily_process.py")


def named_list(day):
    return batches(seed=day), f"day {day}"


def torch_loader(day):
    return torch.utils.data.DataLoader(batches(seed=day), batch_size=None, shuffle=True), f"day {day}"


def loader_of(day):
    return loader(seed=day), None


DATA = {"loader": loader_of, "list": named_list, "torch": torch_loader}


def made(net=None, **options):
    """A Trainer in which everything that has state matters."""
    return trainer(
        net or model(),
        metrics={"auc": kv.metrics.AUC()},
        scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 15, 30], gamma=0.5),
        log_every=7,
        **options,
    )


def fit_day(folder, day, kind="loader", stop_at=None, **options):
    """One day in a Trainer of its own, as a cron job does it."""
    net = model()
    data, name = DATA[kind](day)
    result = made(net, checkpoints=folder, callbacks=[StopAt(stop_at)]).fit(data, data_name=name, **options)
    torch.manual_seed(12345)  # a new process has other random numbers
    return net, result


@pytest.mark.parametrize("kind", DATA)
def test_day_by_day_is_the_same_as_all_days_in_one_trainer(tmp_path, kind):
    for day in (15, 16, 17):
        net, result = fit_day(tmp_path, day, kind)
        assert (result.trained, result.epoch, result.step) == (12, 1, 12 * (day - 14))
    whole = model()
    one = made(whole)
    for day in (15, 16, 17):
        data, name = DATA[kind](day)
        one.fit(data, data_name=name)
    assert one.step == 36
    assert_same(net, whole)


@few_examples(5, thorough=6)
@given(
    kind=st.sampled_from(sorted(DATA)),
    stops=st.lists(st.integers(1, 47), max_size=4, unique=True).map(sorted),
    epochs=st.integers(1, 2),
)
def test_days_that_are_stopped_anywhere_end_like_days_that_are_not(kind, stops, epochs):
    with tempfile.TemporaryDirectory() as straight, tempfile.TemporaryDirectory() as stopped:
        for day in (15, 16):
            expected, _ = fit_day(straight, day, kind, epochs=epochs)
        for day in (15, 16):
            last = 12 * epochs * (day - 14)
            for stop in [stop for stop in stops if last - 12 * epochs < stop < last]:
                assert fit_day(stopped, day, kind, stop_at=stop, epochs=epochs)[1].step == stop
            net, result = fit_day(stopped, day, kind, epochs=epochs)
            assert (result.step, result.epoch) == (last, epochs)
        assert_same(net, expected)
        assert newest(stopped) == newest(straight)


def test_other_data_in_the_middle_of_an_epoch_is_an_error_that_says_what_is_left(tmp_path):
    fit_day(tmp_path, 15, stop_at=5)
    before = newest(tmp_path)
    with pytest.raises(ValueError, match="not trained to its end") as caught:
        fit_day(tmp_path, 16)
    text = str(caught.value)
    assert "It had trained 0 epochs and 5 batches of the next one, of 1 epoch." in text
    assert "memory, 192 records" in text
    assert "drop_unfinished=True" in text
    assert newest(tmp_path) == before
    assert fit_day(tmp_path, 15)[1].trained == 7  # the way out that loses nothing
    assert fit_day(tmp_path, 16)[1].trained == 12


def test_an_epoch_that_was_not_begun_is_unfinished_too(tmp_path):
    class StopAtEpochEnd(kv.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch):
            trainer.stop("enough")

    made(checkpoints=tmp_path, callbacks=[StopAtEpochEnd()]).fit(loader(seed=15), epochs=2)
    with pytest.raises(ValueError, match="trained 1 epochs and 0 batches of the next one, of 2 epochs"):
        fit_day(tmp_path, 16)


def test_the_rest_can_be_dropped_and_the_same_call_resumes_after_a_stop(tmp_path, caplog):
    fit_day(tmp_path, 15, stop_at=5)
    assert fit_day(tmp_path, 16, stop_at=9, drop_unfinished=True)[1].trained == 4
    assert "The rest of memory, 192 records is dropped" in caplog.text
    _, result = fit_day(tmp_path, 16, drop_unfinished=True)
    assert (result.trained, result.step) == (8, 17)


def test_another_order_in_the_middle_of_an_epoch_has_two_ways_out(tmp_path, caplog):
    def fit(seed, stop_at=None, **options):
        columns = {name: column.numpy() for name, column in records(192, seed=15).items()}
        data = kv.data.read(columns, 16, shuffle=64, seed=seed)
        return made(checkpoints=tmp_path, callbacks=[StopAt(stop_at)]).fit(data, epochs=2, **options)

    assert fit(1, stop_at=15).epoch == 1
    with pytest.raises(ValueError, match="only valid for the same data in the same order") as caught:
        fit(2)
    assert "Continue with the settings that the checkpoint's fit had" in str(caught.value)
    assert "drop_unfinished=True" in str(caught.value)
    assert fit(1, stop_at=17).trained == 2
    result = fit(2, drop_unfinished=True)
    assert (result.trained, result.epoch, result.step) == (12, 2, 29)
    assert "The epoch starts again, after 5 batches of it" in caplog.text


def test_the_same_data_once_more_is_nothing_to_do_and_says_so(tmp_path, capfd):
    fit_day(tmp_path, 15)
    again = made(checkpoints=tmp_path, progress="plain").fit(loader(seed=15))
    assert again.trained == 0
    said = capfd.readouterr().err
    assert "The run has trained 1 epoch of this data (memory, 192 records) already." in said
    assert made(checkpoints=tmp_path).fit(loader(seed=15), epochs=2).trained == 12


def test_labels_that_were_corrected_in_place_are_trained(tmp_path):
    columns = {name: column.numpy() for name, column in records(20_000, seed=15).items()}
    path, sizes = tmp_path / "day.csv", set()

    def trained():
        pyarrow.csv.write_csv(pa.table(columns), path)
        sizes.add(path.stat().st_size)
        return made(checkpoints=tmp_path / "run").fit(kv.data.read(path, 1_000)).trained

    assert trained() == 20
    columns["label"][9_000:11_000] = 1 - columns["label"][9_000:11_000]
    assert trained() == 20
    assert trained() == 0
    assert len(sizes) == 1


def test_data_without_an_identity_is_taken_as_the_same_with_a_warning(tmp_path, caplog):
    made(checkpoints=tmp_path).fit(batches(seed=15))
    assert made(checkpoints=tmp_path).fit(batches(seed=16)).trained == 0
    assert "list has no identity" in caplog.text
    assert "fit(data, data_name=…)" in caplog.text
    assert made(checkpoints=tmp_path).fit(batches(seed=16), data_name="day 16").trained == 12


def test_steps_are_counted_for_each_data_as_epochs_are(tmp_path):
    assert fit_day(tmp_path, 15, max_steps=5)[1].step == 5
    assert fit_day(tmp_path, 16, max_steps=5)[1].step == 10  # the fit of day 15 had come to its end
    assert fit_day(tmp_path, 16, max_steps=8)[1].step == 13
    assert fit_day(tmp_path, 16, max_steps=8)[1].trained == 0


def test_early_stopping_finishes_a_day_and_starts_over_with_the_next(tmp_path):
    def fit(day, scores):
        stopping = kv.callbacks.EarlyStopping("score", patience=2)
        one = made(checkpoints=tmp_path, callbacks=[stopping])
        left = iter(scores)
        one.evaluate = lambda data: {"score": next(left)}
        return one.fit(loader(seed=day), eval_data=batches(1), eval_every=3)

    first = fit(15, [0.9, 0.8, 0.7])
    assert (first.step, first.stopped) == (9, "early: score was best at 0.9, 2 evaluations ago")
    assert fit(15, []).trained == 0
    second = fit(16, [0.2, 0.3, 0.4, 0.5])
    assert (second.trained, second.stopped) == (12, None)


def test_a_late_retry_of_an_earlier_day_is_nothing_to_do_and_says_so(tmp_path, capfd, caplog):
    for day in (15, 16):
        fit_day(tmp_path, day)
    before = newest(tmp_path)
    late = made(checkpoints=tmp_path, progress="plain").fit(loader(seed=15))
    assert (late.trained, late.step, late.epoch) == (0, 24, 1)
    said = capfd.readouterr().err
    assert "The run has trained 1 epoch of this data (memory, 192 records) already, up to step 12" in said
    assert "larger epochs or max_steps, or a new data_name" in said
    assert "was trained before: 1 epoch, up to step 12" in caplog.text
    assert newest(tmp_path) == before
    assert fit_day(tmp_path, 17)[1].step == 36


def test_an_earlier_day_is_trained_more_if_more_is_asked_for_or_by_a_new_name(tmp_path):
    for day in (15, 16):
        fit_day(tmp_path, day)
    assert fit_day(tmp_path, 15, stop_at=30, epochs=2)[1].trained == 6
    result = fit_day(tmp_path, 15, epochs=2)[1]
    assert (result.trained, result.step, result.epoch) == (6, 36, 2)
    assert fit_day(tmp_path, 16)[1].trained == 0
    assert fit_day(tmp_path, 15, epochs=2)[1].trained == 0
    one = made(checkpoints=tmp_path)
    assert one.fit(loader(seed=15), data_name="day 15 once more").trained == 12


def test_the_rest_of_data_that_was_dropped_is_not_taken_as_trained(tmp_path):
    fit_day(tmp_path, 15, stop_at=5)
    fit_day(tmp_path, 16, drop_unfinished=True)
    assert fit_day(tmp_path, 15)[1].trained == 12


def test_an_earlier_day_that_early_stopping_has_ended_is_nothing_to_do(tmp_path):
    stopping = kv.callbacks.EarlyStopping("score", patience=1)
    one = made(checkpoints=tmp_path, callbacks=[stopping])
    scores = iter([0.9, 0.8])
    one.evaluate = lambda data: {"score": next(scores)}
    assert one.fit(loader(seed=15), eval_data=batches(1), eval_every=3).step == 6
    assert fit_day(tmp_path, 16)[1].step == 18
    for _ in range(2):
        assert fit_day(tmp_path, 15)[1].trained == 0


def test_a_loop_of_ones_own_has_the_epochs_of_an_earlier_day(tmp_path, caplog):
    for day in (15, 16):
        context_day(tmp_path, day)
    _, ctx = context_day(tmp_path, 15)
    assert (ctx.step, ctx.epoch) == (24, 1)
    assert "was trained before: 1 epoch, up to step 12" in caplog.text
    assert trainer(checkpoints=tmp_path).fit(loader(seed=16)).trained == 0


def test_days_of_one_loop_are_known_to_later_ones(tmp_path):
    context = kv.TrainContext(
        model(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
    )
    with context as ctx:
        for day in (15, 16):
            for batch in ctx.loader(loader(seed=day)):
                output, labels = ctx.forward(batch)
                ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels))
        ctx.save(tmp_path)
    for day, steps in ((15, 0), (17, 12)):
        assert trainer(checkpoints=tmp_path).fit(loader(seed=day)).trained == steps


def test_callbacks_are_told_of_new_data_and_only_of_that(tmp_path):
    told = []

    class Told(kv.callbacks.Callback):
        def on_new_data(self, trainer):
            told.append((trainer.step, trainer.epoch))

    for day in (15, 15, 16):
        made(checkpoints=tmp_path, callbacks=[Told()]).fit(loader(seed=day))
    assert told == [(12, 0)]
    alone = made(callbacks=[Told()])
    for day in (15, 16):
        alone.fit(loader(seed=day))
    assert told == [(12, 0), (12, 0)]


def test_files_that_were_in_the_data_before_are_counted(tmp_path, capfd):
    for day in (15, 16):
        columns = {name: column.numpy() for name, column in records(64, seed=day).items()}
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / f"{day}.parquet")
    for what in ("15.parquet", "*.parquet"):
        made(checkpoints=tmp_path / "run", progress="plain").fit(kv.data.read(tmp_path / what, 16))
    said = capfd.readouterr().err
    assert f"with new data: {tmp_path}/15.parquet and 1 more, 128 records." in said
    assert "1 of its 2 files were trained on before." in said


def test_fits_of_one_trainer_save_deltas_from_day_to_day(tmp_path):
    checkpoints = kv.Checkpoints(tmp_path, keep_last=None, full_every=10)
    net = model()
    one = made(net, checkpoints=checkpoints)
    for day in (15, 16, 17):
        one.fit(loader(seed=day))
    assert [each.kind for each in checkpoints.list()] == ["full", "delta", "delta"]
    other = model()
    made(other, checkpoints=tmp_path).fit(loader(seed=17))
    assert_same(net, other)


def test_tables_that_were_changed_between_two_fits_are_read_from_the_checkpoint(tmp_path):
    nets = []
    for changes in (False, True):
        nets.append(model())
        one = made(nets[-1], checkpoints=tmp_path / str(changes))
        one.fit(loader(seed=15))
        if changes:
            nets[-1].embeddings.table("user").clear()
        one.fit(loader(seed=16))
    assert_same(*nets)


def test_a_fit_without_resume_counts_steps_from_0_with_the_model_as_it_is():
    one = made()
    one.fit(loader(seed=15))
    assert one.fit(loader(seed=16), resume=False).step == 12


def test_progress_is_told_the_steps_of_all_days(tmp_path):
    told = []

    class Progress(kv.train.NoProgress):
        def begin(self, step, total, *more):
            told.append((step, total))

    for day in (15, 16):
        fit = made(checkpoints=tmp_path, progress=Progress())
        fit.fit(batches(seed=day), data_name=str(day))
    assert told == [(0, 12), (12, 24)]


class Grows:
    """A log that is read from its position to its end."""

    def __init__(self, days):
        self.days, self.position = days, 0

    def __iter__(self):
        whole = [batch for day in range(self.days) for batch in batches(4, seed=day)]
        for batch in whole[self.position :]:
            self.position += 1
            yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def identity(self):
        return kv.data.Identity("log", "the log", grows=True)


def test_data_that_grows_continues_at_its_position(tmp_path):
    for days in (1, 3):
        net = model()
        result = made(net, checkpoints=tmp_path).fit(Grows(days))
        assert result.step == 4 * days
    straight = model()
    made(straight).fit(Grows(3))
    assert_same(net, straight)


def write_window(root, day):
    folder = root / f"day={day}"
    folder.mkdir(parents=True)
    columns = {name: column.numpy() for name, column in records(64, seed=day).items()}
    pyarrow.parquet.write_table(pa.table(columns), folder / "part-0.parquet")
    (folder / "_SUCCESS").touch()


def train_windows(root, folder, stop_at=None):
    windows = kv.data.Windows(root, "day=*", read=lambda path: kv.data.read(path, 16, shuffle=32))
    net = model()
    one = made(net, checkpoints=folder, callbacks=[StopAt(stop_at)])
    seen = []
    for window in one.remaining(windows):
        seen.append(window.name)
        if one.fit(window.loader).stopped:
            break
    return net, seen


def test_windows_that_were_trained_on_are_not_given_again(tmp_path):
    root, folder = tmp_path / "clicks", tmp_path / "run"
    for day in (15, 16, 17):
        write_window(root, day)
    (root / "_END").touch()
    expected, seen = train_windows(root, tmp_path / "straight")
    assert seen == ["day=15", "day=16", "day=17"]
    assert train_windows(root, folder, stop_at=6)[1] == ["day=15", "day=16"]
    net, seen = train_windows(root, folder)
    assert seen == ["day=16", "day=17"]
    assert_same(net, expected)
    assert train_windows(root, folder)[1] == []


def process(folder, day):
    command = [sys.executable, PROCESS, folder, str(day)]
    return ForkedProgram(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(folder, day):
    output, errors = process(folder, day).communicate(timeout=120)
    assert f"step {50 * (day - 14)} " in output, errors


@pytest.mark.slow
def test_a_process_killed_on_the_second_day_ends_with_the_same_checkpoint(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(straight, 15)
    subprocess.run(["cp", "-r", straight, killed], check=True)
    finish(straight, 16)
    running = process(killed, 16)
    next(line for line in running.stdout if line.strip() == "83")
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    finish(killed, 16)
    one, other = newest(killed), newest(straight)
    assert {name: one[name] for name in ("step", "state", "dense")} == {
        name: other[name] for name in ("step", "state", "dense")
    }
    ends = [kv.Checkpoints(folder).latest() for folder in (killed, straight)]
    for table in ("user", "item"):
        rows = [[[part.tobytes() for part in rows] for rows in end.parts(table)] for end in ends]
        assert rows[0] == rows[1]


def context_day(folder, day, until=None, name=None, **options):
    """One day in a loop of one's own."""
    net = model()
    data = loader(seed=day) if name is None else batches(seed=day)
    context = kv.TrainContext(
        net,
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
    )
    with context as ctx:
        if kv.Checkpoints(folder).latest():
            ctx.load(folder, data=data, data_name=name, **options)
        for _ in range(ctx.epoch, 1):
            for batch in ctx.loader(data, data_name=name):
                output, labels = ctx.forward(batch)
                ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels))
                if ctx.step == until:
                    break
        ctx.save(folder)
    torch.manual_seed(12345)
    return net, ctx


@pytest.mark.parametrize("name", [None, "day {}"])
def test_loops_of_ones_own_continue_on_the_next_day(tmp_path, name):
    def named(day):
        return None if name is None else name.format(day)

    for day in (15, 16):
        expected, ctx = context_day(tmp_path / "straight", day, name=named(day))
        assert (ctx.step, ctx.epoch) == (12 * (day - 14), 1)
    folder = tmp_path / "stopped"
    context_day(folder, 15, until=4, name=named(15))
    with pytest.raises(ValueError, match="trained 0 epochs and 4 batches"):
        context_day(folder, 16, name=named(16))
    context_day(folder, 15, name=named(15))
    context_day(folder, 16, until=17, name=named(16))
    net, ctx = context_day(folder, 16, name=named(16))
    assert (ctx.step, ctx.epoch) == (24, 1)
    assert_same(net, expected)
    _, ctx = context_day(folder, 16, name=named(16))
    assert ctx.step == 24


def test_a_loop_and_a_trainer_take_turns_day_by_day(tmp_path):
    context_day(tmp_path, 15)
    result = trainer(checkpoints=tmp_path).fit(loader(seed=16))
    assert (result.step, result.trained) == (24, 12)
    assert context_day(tmp_path, 17)[1].step == 36


def test_new_data_that_a_loop_has_not_begun_is_not_finished(tmp_path):
    context_day(tmp_path, 15)
    context = kv.TrainContext(
        model(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
    )
    with context as ctx:
        ctx.load(tmp_path, data=loader(seed=16))
        ctx.save(tmp_path)
    assert context_day(tmp_path, 16)[1].step == 24
