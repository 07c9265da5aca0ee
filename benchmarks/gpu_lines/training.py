"""Lines of a whole training: Parquet on disk to updated rows on the GPU, by `karvan.Trainer`.

Reading alone ends with batches on the GPU. Training alone has the same batches there already, in the same
Trainer. Both together should reach the slower of them. The three take turns. Files are written by the run
itself, so they are read from the page cache.

This needs pyarrow and the native core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import cores
from numpy.typing import NDArray

import karvan as kv
from gpu_lines import trace
from gpu_lines.device import Device
from gpu_lines.dlrm_step import bytes_of_samples, id_names, make_model, number_names, step_bytes
from gpu_lines.results import Wanted
from gpu_lines.run import Run
from gpu_lines.sizes import Sizes
from karvan.devices import Check

_SETTLED = 10  # steps of a fit before any is looked at
_STEPS_WITHOUT_WAIT = 2  # see steps.py
_PAUSE = 6  # steps between two looks at the host
_REPORTS = 100  # steps between two reports of the loss, for which the host waits


def write_files(folder: Path, sizes: Sizes) -> int:
    """Write Criteo-like samples, a batch in each row group; returns how many bytes."""

    def ids(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        power = 1 - 1.05
        drawn = ((sizes.model_keys**power - 1) * rng.random(count) + 1) ** (1 / power)
        return drawn.astype(np.int64) * 7919

    def write(number: int) -> int:
        rng = np.random.default_rng([7, number])
        rows = sizes.file_batches * sizes.batch
        columns = {"label": rng.integers(0, 2, rows).astype(np.float32)}
        for name in number_names(sizes):
            columns[name] = np.log1p(rng.standard_exponential(rows, np.float32))
        columns |= {name: ids(rng, rows) for name in id_names(sizes)}
        path = folder / f"{number:03d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=sizes.batch)
        return path.stat().st_size

    with ThreadPoolExecutor(cores()) as pool:
        return sum(pool.map(write, range(sizes.files)))


class HeldBatches:
    """Batches that are on the device already, several times; their labels are checked once."""

    def __init__(self, batches: Sequence[kv.Batch], times: int) -> None:
        self._batches, self._times = batches, times

    @contextmanager
    def check_batches(self, check: Check) -> Iterator[None]:
        """As of a Loader: batches are checked before training, which would wait for the device."""
        for batch in self._batches:
            if check not in getattr(batch, "checks", ()):
                check(batch)
                batch.checks = (check,)  # type: ignore[attr-defined]
        yield

    def __iter__(self) -> Iterator[kv.Batch]:
        for _ in range(self._times):
            yield from self._batches


class Stretch(kv.callbacks.Callback):
    """Calls a function for every step of a fit, with its number in the fit."""

    def __init__(self) -> None:
        self.look: Callable[[int], None] = lambda number: None
        self.until_report = 0  # steps
        self._number = 0

    def on_fit_begin(self, trainer: kv.callbacks.TrainerView) -> None:
        """Count from 0."""
        self._number = 0

    def on_step_end(self, trainer: kv.callbacks.TrainerView, logs: object) -> None:
        """A step was queued."""
        self._number += 1
        self.until_report = -trainer.step % _REPORTS
        self.look(self._number)


class Training:
    """The Trainer and its data."""

    def __init__(self, device: Device, sizes: Sizes, folder: Path) -> None:
        self._device, self._sizes, self._folder = device, sizes, folder
        self.stretch = Stretch()
        self.trainer = kv.Trainer(
            make_model(device, sizes),
            kv.losses.BinaryCrossEntropy(),
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
            sparse_optimizer=kv.optim.Adagrad(lr=0.01),
            precision="bf16",
            progress="none",
            device=device.device,
            callbacks=[self.stretch],
            log_every=_REPORTS,
        )

    def loader(self, epochs: int) -> kv.data.Loader:
        """The batches of the files, on their way to the device."""
        return kv.data.read(
            self._folder / "*.parquet", self._sizes.batch, epochs=epochs, device=self._device.device
        )

    def held(self) -> list[kv.Batch]:
        """All batches of the files, on the device."""
        found = list(self.loader(1))
        self._device.wait()
        return found

    def read(self) -> int:
        """Read everything; returns the samples."""
        count = sum(batch.samples for batch in self.loader(self._sizes.epochs))
        self._device.wait()
        return count

    def train(self, data: kv.data.Loader | HeldBatches) -> int:
        """Train on everything; returns the samples."""
        steps = self.trainer.fit(data).trained
        self._device.wait()
        return steps * self._sizes.batch


def parquet(run: Run) -> None:
    """Parquet to updated rows, beside reading alone and training alone, and a trace of the training."""
    device, sizes, results = run.device, run.sizes, run.results
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        size = write_files(Path(name), sizes)
        written = time.perf_counter() - begin
        training = Training(device, sizes, Path(name))
        training.train(training.loader(1))  # gives every key its row
        batches = training.held()
        held = HeldBatches(batches, sizes.epochs)
        rates = _rates(
            {
                "reading": training.read,
                "training": lambda: training.train(held),
                "together": lambda: training.train(training.loader(sizes.epochs)),
            },
            sizes.fit_rounds,
        )
        _report(run, rates, sum(len(batches[0][name].unique()) for name in id_names(sizes)))
        results.note(
            parquet_samples=sizes.files * sizes.file_batches * sizes.batch,
            parquet_MB=size / 1e6,
            parquet_written_in_s=written,
        )
        _host_time(run, training)
        results.save()
        _trace(run, training)


def _report(run: Run, rates: Mapping[str, float], unique: int) -> None:
    """Add the three rates and their ratio; unique: distinct keys of a batch."""
    sizes, results = run.sizes, run.results
    upload = bytes_of_samples(sizes) / run.upload_bandwidth
    on_device = step_bytes(sizes, unique) / run.bandwidth
    bounds = {"reading": upload, "training": on_device, "together": max(upload, on_device)}
    titles = {
        "reading": "Parquet to batches on the GPU, alone",
        "training": "Trainer, batches on the GPU, alone",
        "together": "Parquet to updated rows, Trainer",
    }
    for name, rate in rates.items():
        results.add(
            f"parquet_{name}_M_samples_per_s",
            titles[name],
            rate / 1e6,
            "M samples/s",
            share=rate / sizes.batch * bounds[name],
        )
    results.ratio(
        "dlrm_vs_input_limit",
        "  together / the slower of the two",
        rates["together"] / min(rates["reading"], rates["training"]),
        Wanted(0.8),
    )


def _rates(candidates: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Samples per second: the median of rounds, in which all take turns, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            begin = time.perf_counter()
            samples = run()
            if turn:
                found[name].append(samples / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in found.items()}


def _host_time(run: Run, training: Training) -> None:
    """Add how long the Trainer's thread takes to queue a step while it does not wait for the device."""
    device, times = run.device, []
    before = 0.0

    def look(number: int) -> None:
        nonlocal before
        now = time.perf_counter()
        turn = number % (_PAUSE + _STEPS_WITHOUT_WAIT)
        if number > _SETTLED and before:
            times.append(now - before)
        before = 0.0
        if turn == 0:
            device.wait()
        if turn < _STEPS_WITHOUT_WAIT:
            before = time.perf_counter()

    training.stretch.look = look
    training.train(training.loader(run.sizes.epochs))
    training.stretch.look = lambda number: None
    if times:
        run.results.add(
            "trainer_host_us", "Trainer: host's time to queue a step", statistics.median(times) * 1e6, "us"
        )
    else:
        run.results.skip("trainer_host_us", f"a fit had no more than {_SETTLED} steps")


def _trace(run: Run, training: Training) -> None:
    """Add what a trace of steps between two reports says, and write it if it was asked for."""
    steps = run.sizes.traced
    if run.sizes.epochs * run.sizes.files * run.sizes.file_batches < _SETTLED + 2 * steps:
        run.results.skip("trainer_trace", f"a fit has less than {_SETTLED + 2 * steps} steps")
        return
    recorder = trace.Recorder(run.device)
    first: int | None = None

    def look(number: int) -> None:
        nonlocal first
        if first is None and number >= _SETTLED and training.stretch.until_report > steps:
            first = number
            recorder.start()
        elif first is not None and number == first + steps:
            recorder.stop()

    training.stretch.look = look
    training.train(training.loader(run.sizes.epochs))
    training.stretch.look = lambda number: None
    trace.report(run, "trainer", "Trainer from Parquet", steps, recorder.events(run.trace))
