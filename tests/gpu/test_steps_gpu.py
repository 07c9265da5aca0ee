"""Steps of training with rows on a GPU: what a `kv.Trainer` does for each step, with only torch and triton.

A step waits for nothing that is queued on the GPU, in any precision, and skips itself where gradients are not
finite. test_training_gpu.py has the Trainer itself.
"""

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from gpu_steps import Reference, Run, batches, damaged
from gpu_waits import no_synchronization

import karvan as kv
from karvan.torch_internals import skips_on_device
from karvan.train.optimizer_step import fuse_on_gpu

PRECISIONS = ["fp32", "bf16", "fp16"]
DEVICE = torch.device("cuda", 0)


def warm(run, groups, rounds=4):
    """Compile kernels, insert rows, record graphs; also those for when the host is ahead of the GPU."""
    for _ in range(rounds):
        for group in groups:
            run.step(group)
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        for group in groups[:3]:
            run.step(group)
    torch.cuda.synchronize()
    run.outcomes.settle()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_call_of_a_step_waits_for_the_gpu(precision, accumulate):
    run = Run(DEVICE, precision, accumulate, clip_norm=10.0)
    data = batches(6 * accumulate)
    groups = [data[i : i + accumulate] for i in range(0, len(data), accumulate)]
    warm(run, groups)
    skipped = run.counts.skipped
    with no_synchronization():
        for group in groups:
            taken = run.step(group)
            assert isinstance(taken, torch.Tensor)
    run.outcomes.settle()
    assert run.counts.skipped == skipped
    assert run.metric.compute() > 0.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_is_ahead_of_the_gpu(precision):
    """After two steps, the GPU is still busy with what was queued before them."""
    run, groups = Run(DEVICE, precision), [[batch] for batch in batches(6)]
    warm(run, groups)
    ahead = []
    for _ in range(8):  # the first ones may still allocate page-locked memory, which can wait
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # about half a second
        slept = torch.cuda.current_stream().record_event()
        begin = time.perf_counter()
        for group in groups[:2]:
            run.step(group)
        ahead.append((not slept.query(), time.perf_counter() - begin))
    torch.cuda.synchronize()
    assert all(still_sleeps for still_sleeps, _ in ahead[-3:]), ahead


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trace_of_steps_has_no_synchronisation(precision):
    run, groups = Run(DEVICE, precision), [[batch] for batch in batches(6)]
    warm(run, groups)
    found = []
    for _ in range(4):  # a graph that is recorded meanwhile, which happens a few times, synchronises
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for group in groups:
                with torch.profiler.record_function("a step"):
                    run.step(group)
        events = profile.events()
        if not any("aunch" in event.name and event.name.startswith("cu") for event in events):
            pytest.skip("the profiler sees no calls of CUDA here")
        on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
        steps = [event.time_range for event in on_host if event.name == "a step"]
        assert len(steps) == len(groups)
        found = [
            event.name
            for event in on_host
            if event.name in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cuCtxSynchronize")
            and any(step.start <= event.time_range.start <= step.end for step in steps)
        ]
        if not found:
            break
    assert found == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_agree_with_those_of_torch_and_bad_ones_are_skipped(accumulate):
    run, reference = Run(DEVICE, accumulate=accumulate), Reference(DEVICE, accumulate)
    data = batches(8 * accumulate)
    outcomes = []
    for number in range(8):
        group = data[number * accumulate : (number + 1) * accumulate]
        bad = number in (0, 5)
        if not bad:
            reference.step(group)
        outcomes.append(run.step([*group[:-1], damaged(group[-1])] if bad else group))
    assert [bool(taken) for taken in outcomes] == [number not in (0, 5) for number in range(8)]
    run.outcomes.settle()
    assert run.counts.skipped == 2
    for name, value in reference.state().items():
        torch.testing.assert_close(run.state()[name], value, rtol=2e-3, atol=2e-4, msg=name)
    steps = {int(state["step"]) for state in run.dense.state.values()}
    assert steps == {6}  # torch's optimizer does not count a step that it skips


def test_a_skipped_step_changes_no_bit():
    run, data = Run(DEVICE), batches(4)
    for batch in data:
        run.step([batch])
    before = run.state(optimizers=True)
    assert not bool(run.step([damaged(data[1])]))
    after = run.state(optimizers=True)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert bool(run.step([data[1]]))
    assert not torch.equal(run.state()["user"], after["user"])


def test_the_host_learns_later_which_step_was_skipped_and_why(caplog):
    run, data = Run(DEVICE), batches(6)
    warm(run, [[batch] for batch in data])
    torch.cuda._sleep(200_000_000)
    run.step([damaged(data[0])])
    assert run.counts.skipped == 0  # nobody knows yet
    number = run.number
    torch.cuda.synchronize()
    run.step([data[1]])
    assert run.counts.skipped == 1
    assert f"Step {number} was skipped: the loss is not finite. Column 'price' has NaN" in caplog.text
    run.outcomes.settle()
    assert run.counts.skipped == 1


def test_the_scale_of_fp16_falls_at_overflows_and_rises_again():
    run, data = Run(DEVICE, "fp16", factor=1000.0), batches(4)
    run.precision._scaler.set_growth_interval(2)
    run.look_up(data[0])
    before, taken = run.state(optimizers=True), [bool(run.step([data[0]]))]
    assert not taken[0]  # 65,536 times 1,000 is too much for fp16
    after = run.state(optimizers=True)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    while taken[-2:] != [True, True]:
        taken.append(bool(run.step([data[len(taken) % 4]])))
        assert len(taken) < 24
    assert run.precision.state_dict()["scale"] == 65_536 / 2 ** taken.count(False) * 2
    run.outcomes.settle()
    assert run.counts.skipped == taken.count(False)
    assert all(torch.isfinite(value).all() for value in run.state().values())


def test_scaled_gradients_reach_rows_unscaled():
    """fp16 without any product in fp16: only the scale differs from fp32."""
    plain, scaled = (Run(DEVICE, precision, products=False) for precision in ("fp32", "fp16"))
    for batch in batches(5):
        assert bool(plain.step([batch]))
        assert bool(scaled.step([batch]))
    for name, value in plain.state().items():
        torch.testing.assert_close(scaled.state()[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_train_like_those_of_32(dtype):
    run, reference = Run(DEVICE, dtype=dtype), Reference(DEVICE)
    for batch in batches(12):
        run.step([batch])
        reference.step([batch])
    tolerance = 0.02 if dtype is torch.float16 else 0.1
    for name, value in reference.state().items():
        torch.testing.assert_close(run.state()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_a_graph_of_the_program_cannot_have_lookups_or_updates():
    engine = kv.EmbeddingEngine({"f": kv.Table(8)}, store=Run.store(DEVICE))
    sparse, ids = kv.optim.SGD(engine, lr=0.1), torch.arange(70, device=DEVICE)
    for work in (lambda: engine({"f": ids}), sparse.step):
        engine({"f": ids})["f"].sum().backward()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="records a CUDA graph"), torch.cuda.graph(recorded):
            work()
    before = engine.table("f").snapshot().vectors
    engine({"f": ids})["f"].sum().backward()
    sparse.step()
    assert (engine.table("f").snapshot().vectors != before).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_dense_part_can_be_compiled(precision):
    plain, compiled = Run(DEVICE, precision), Run(DEVICE, precision, compiled=True)
    groups = [[batch] for batch in batches(6)]
    for group in groups:
        plain.step(group)
        compiled.step(group)
    tolerance = 5e-3 if precision == "fp32" else 0.1
    for name, value in plain.state().items():
        torch.testing.assert_close(compiled.state()[name], value, rtol=tolerance, atol=tolerance, msg=name)
    warm(compiled, groups)
    with no_synchronization():
        for group in groups:
            compiled.step(group)


def test_optimizers_are_fused_unless_the_program_says_otherwise():
    weights = [torch.zeros(3, device=DEVICE, requires_grad=True)]
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        made = make([{"params": weights, "lr": 0.25}], lr=0.5, weight_decay=0.125)
        (group,) = made.param_groups
        fuse_on_gpu(made)
        assert skips_on_device(made)
        assert made.param_groups[0] is group
        assert (group["lr"], group["weight_decay"], made.defaults["lr"]) == (0.25, 0.125, 0.5)
        for other in ({"fused": False}, {"foreach": False}, {"foreach": True}):
            given = make(weights, lr=0.5, **other)
            fuse_on_gpu(given)
            assert not skips_on_device(given)
        observed = make(weights, lr=0.5)
        observed.register_step_post_hook(lambda *_: None)
        fuse_on_gpu(observed)
        assert not skips_on_device(observed)


def train_new_keys(engine, optimizer):
    """Steps of 16,384 new keys of 6 KiB each, until the GPU is full."""
    for step in range(40):
        keys = torch.arange(step * 16_384, (step + 1) * 16_384, device=DEVICE).view(64, 256)
        out = engine({"wide": keys, "small": keys[:, 0].contiguous()})
        (out["wide"].sum() + out["small"].sum()).backward()
        optimizer.step()


def test_a_full_gpu_names_the_tables_and_their_sizes():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    limit = torch.cuda.memory_reserved(DEVICE) + 2**30
    engine = kv.EmbeddingEngine({"wide": kv.Table(512), "small": kv.Table(4)}, store=Run.store(DEVICE))
    optimizer = kv.optim.Adam(engine, lr=0.01)
    torch.cuda.set_per_process_memory_fraction(limit / total, DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no memory left on cuda:0 for more rows") as caught:
            train_new_keys(engine, optimizer)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    text = str(caught.value)
    assert text.index("wide (") < text.index("small (")  # the largest first
    assert "GiB" in text
    assert "rows)" in text
    assert "kv.eviction.LRU" in text
    del engine, optimizer, caught
    torch.cuda.empty_cache()
