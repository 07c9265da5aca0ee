"""`benchmarks/gpu.py`: every line on the CPU, at sizes at which times mean nothing, and what traces say."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu
import pytest
from gpu_lines import correctness, trace
from gpu_lines.device import Device, take_turns
from gpu_lines.results import Results, Wanted
from gpu_lines.run import Run
from gpu_lines.sizes import QUICK, Sizes
from hypothesis import given
from hypothesis import strategies as st

PROGRAM = Path(gpu.__file__)

TINY = Sizes(
    rounds=1,
    steps=2,
    dim=8,
    sets=2,
    copied=1 << 10,
    repeats=1,
    slots=1 << 8,
    loads=(0.5,),
    queries=64,
    inserted=64,
    tables=2,
    lookups=50,
    universe=200,
    host_rounds=1,
    features=3,
    batch=32,
    bag_rows=50,
    bag_steps=2,
    numbers=2,
    model_keys=100,
    bottom=(8,),
    top=(8,),
    files=2,
    file_batches=3,
    epochs=4,
    fit_rounds=1,
    traced=3,
    tier_checked=24,
    tier_rows=128,
    tier_table_rows=0,
    tier_batches=4,
    tier_table_batches=3,
    tier_warm=1,
)

# The figures that each line must give, with a share of the bytes bound where True.
FIGURES = {
    "index": {f"{what}_at_0.5_G_per_s": True for what in ("find", "find_or_insert", "insert")},
    "gather": {"gather_vs_copy": True, "gather_ms": False, "gather_effective_TB_per_s": False},
    "step": {
        "step_ms": True,
        "step_device_ms": True,
        "step_host_us": False,
        "step_host_look_up_us": False,
        "step_host_backward_us": False,
        "step_host_update_us": False,
    },
    "w26": {"w26_ms": True, "w26_embedding_bags_ms": True},
    "dlrm": {"dlrm_M_samples_per_s": True},
    "tier": {
        "tier_device_M_samples_per_s": True,
        "tier_tier_M_samples_per_s": True,
        "tier_hit_rate": False,
    },
    "parquet": {
        "parquet_reading_M_samples_per_s": True,
        "parquet_training_M_samples_per_s": True,
        "parquet_together_M_samples_per_s": True,
        "trainer_host_us": False,
    },
}
RATIOS = {
    "step": "step_vs_bytes_bound",
    "w26": "w26_vs_embeddingbag",
    "tier": "host_tier_vs_device",
    "parquet": "dlrm_vs_input_limit",
}


def run_of(tmp_path, sizes=TINY):
    return Run(Device("cpu"), sizes, Results(True, str(tmp_path / "gpu.json")), str(tmp_path / "trace.json"))


@pytest.mark.parametrize("line", gpu.LINES)
def test_a_line_gives_its_figures(line, tmp_path, capsys):
    run = run_of(tmp_path)
    gpu.measure(run, [line])
    assert run.results.failed == []
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["name"] == "gpu"
    assert list(written["ratios"]) == ([RATIOS[line]] if line in RATIOS else [])
    for name, bounded in FIGURES[line].items():
        assert written["figures"][name] > 0
        assert (f"{name}_share_of_bytes_bound" in written["figures"]) == bounded
    assert all(math.isfinite(value) for value in written["ratios"].values())
    run.results.show()
    assert "of the bytes bound" in capsys.readouterr().out


@pytest.mark.slow
def test_the_host_tier_of_many_tables(tmp_path):
    run = run_of(tmp_path, replace(TINY, tier_table_rows=64))
    gpu.measure(run, ["tier"])
    assert run.results.failed == []
    assert run.results.report.figures["tier26_vs_device"] > 0
    assert 0 < run.results.report.figures["tier26_hit_rate"] <= 1


@pytest.mark.slow
def test_the_index_at_all_loads(tmp_path):
    run = run_of(tmp_path, replace(TINY, loads=Sizes().loads, slots=1 << 9))
    gpu.measure(run, ["index"])
    assert run.results.failed == []
    assert run.results.report.figures["find_at_0.75_G_per_s"] > 0


def test_results_are_checked_before_anything_is_timed():
    correctness.check(Device("cpu"), samples=24)


def test_every_line_is_listed_here():
    assert FIGURES.keys() == gpu.LINES.keys()


def test_a_trace_without_a_gpu_is_skipped_and_says_so(tmp_path, capsys):
    run = run_of(tmp_path)
    trace.report(run, "trainer", "training", 3, [])
    assert "no work of a GPU" in run.results.report.figures["trainer_trace_skipped"]
    run.results.show()
    assert "trainer_trace was skipped" in capsys.readouterr().out


def test_parquet_is_skipped_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    run = run_of(tmp_path)
    gpu.LINES["parquet"](run)
    assert run.results.report.figures["parquet_skipped"] == "needs pyarrow"
    assert run.results.report.ratios == {}


def test_a_line_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def fail(run):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(
        gpu, "LINES", {"index": fail, "dlrm": lambda run: run.results.ratio("fine", "fine", 1.0)}
    )
    run = run_of(tmp_path)
    gpu.measure(run, list(gpu.LINES))
    assert run.results.failed == ["index"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["ratios"] == {"fine": 1.0}
    assert written["figures"]["index_failed"] == "RuntimeError: out of luck"
    assert "out of luck" in capsys.readouterr().err


def test_candidates_take_turns():
    calls = []
    candidates = {name: lambda number, name=name: calls.append((name, number)) for name in ("a", "b")}
    seconds = take_turns(Device("cpu"), candidates, 2, {"a": 1, "b": 2})
    assert seconds.keys() == {"a", "b"}
    expected = [("a", [0, 1]), ("b", [0, 1, 2, 3]), ("a", [2, 3]), ("b", [4, 5, 6, 7])]
    assert calls == [(name, number) for name, numbers in expected for number in numbers]


@pytest.mark.parametrize(
    ("limit", "at_most", "met"),
    [(1.0, False, True), (3.0, False, False), (3.0, True, True), (1.0, True, False)],
)
def test_a_wanted_figure_is_met_or_not(limit, at_most, met):
    assert Wanted(limit, at_most).is_met(2.0) is met


def test_quick_is_smaller():
    assert QUICK.rounds * QUICK.steps < Sizes().rounds * Sizes().steps
    assert QUICK.tier_warm + QUICK.rounds * (QUICK.steps + 6) <= QUICK.tier_batches  # no batch comes twice
    assert Sizes().tier_warm + Sizes().rounds * (Sizes().steps + 6) <= Sizes().tier_batches


def event(cat, name, ts, dur=1.0):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_trace_says_how_busy_the_gpu_was_and_who_waited():
    found = trace.summarise(
        [
            event("cuda_runtime", "cudaDeviceSynchronize", 0),  # of the profiler
            event("cuda_runtime", "cudaLaunchKernel", 10),
            event("kernel", "find_rows", 20, 30),
            event("gpu_memcpy", "Memcpy HtoD", 40, 20),
            event("cuda_runtime", "cudaStreamSynchronize", 41),
            event("cuda_driver", "cuStreamSynchronize", 42),
            event("cuda_driver", "cuMemcpyDtoH_v2", 43),
            event("cuda_runtime", "cudaMemcpyAsync", 44),
            event("cuda_runtime", "cudaEventSynchronize", 45),
            event("cuda_runtime", "cudaStreamWaitEvent", 46),
            event("cpu_op", "aten::add", 47),
            event("cuda_runtime", "cudaGraphLaunch", 50),
            {"ph": "M", "name": "process_name"},
            event("kernel", "update", 80, 20),
            event("cuda_runtime", "cudaDeviceSynchronize", 90),
            event("cuda_runtime", "cudaMemcpyAsync", 95),  # of the next batch, on the feed's thread
        ]
    )
    assert found.seconds == pytest.approx(80e-6)
    assert found.busy_seconds == pytest.approx(60e-6)
    assert found.busy_share == pytest.approx(0.75)
    assert found.launches == 2
    assert found.waits == {"cudaStreamSynchronize": 1, "cuStreamSynchronize": 1, "cuMemcpyDtoH_v2": 1}
    assert (found.event_waits, found.event_wait_seconds) == (1, pytest.approx(1e-6))


def test_a_trace_becomes_figures(tmp_path):
    run = run_of(tmp_path)
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0),
        event("cuda_runtime", "cudaStreamSynchronize", 1),
        event("cuda_runtime", "cudaLaunchKernel", 2),
        event("kernel", "a", 1000, 1000),
    ]
    trace.report(run, "trainer", "training", 2, events)
    figures = run.results.report.figures
    assert figures["trainer_gpu_busy_share"] == 1.0
    assert figures["trainer_gpu_ms"] == pytest.approx(0.5)
    assert figures["trainer_waits_per_step"] == 0.5
    assert figures["trainer_waits"] == "cudaStreamSynchronize 1"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_covered_time_counts_every_moment_once(given_spans):
    spans = [(begin, begin + size) for begin, size in given_spans]
    moments = {moment for begin, end in spans for moment in range(begin, end)}
    assert trace.covered(spans) == len(moments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "step,speed"], "expected some of index,gather,step"),
        (["--only", ""], "expected some of index,gather,step"),
        (["--only", "step", "--trace", "x.json"], "--trace is of the line parquet"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit):
        gpu.main()
    assert message in capsys.readouterr().err


@pytest.mark.skipif(gpu.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_it_starts_with_only_torch_triton_and_numpy():
    code = f"""
import runpy, sys
sys.modules["pyarrow"] = None
sys.argv = ["gpu.py", "--quick"]
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""
    path = {"PYTHONPATH": str(PROGRAM.parent)}  # as if Python had been started with the program
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | path
    )
    assert made.returncode == 1
    assert "expects a GPU, and torch finds none here" in made.stderr
    assert "Traceback" not in made.stderr
