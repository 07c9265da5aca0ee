"""The DLRM of the Criteo-1TB shape, with the input on the GPU, in a loop of plain torch.

`training.py` has the same model in a Trainer.
"""

from __future__ import annotations

import torch
from torch import nn

import karvan as kv
from gpu_lines.device import Device, power_law, take_turns
from gpu_lines.results import Wanted
from gpu_lines.run import Run
from gpu_lines.sizes import Sizes
from gpu_lines.steps import least_bytes, unique_keys


def number_names(sizes: Sizes) -> list[str]:
    """The names of the numbers."""
    return [f"i{i}" for i in range(sizes.numbers)]


def id_names(sizes: Sizes) -> list[str]:
    """The names of the ids."""
    return [f"c{i}" for i in range(sizes.features)]


def make_model(device: Device, sizes: Sizes) -> kv.models.DLRM:
    """The model, with tables on the device."""
    device.connect()
    return kv.models.DLRM(
        number_names(sizes),
        id_names(sizes),
        sizes.dim,
        bottom=sizes.bottom,
        top=sizes.top,
        table=kv.Table(sizes.dim),
    ).to(device.device)


def bytes_of_samples(sizes: Sizes) -> int:
    """Bytes of a batch: ids of 64 bits, numbers and a label of 32."""
    return sizes.batch * (8 * sizes.features + 4 * sizes.numbers + 4)


def step_bytes(sizes: Sizes, unique: int) -> int:
    """Bytes that a step must move on the device, without those of the dense layers."""
    embedded = least_bytes(sizes.dim, unique, sizes.features * sizes.batch, states=1)
    return embedded + bytes_of_samples(sizes)


def dlrm(run: Run) -> None:
    """DLRM, batch 65,536, bf16, with the input on the GPU."""
    device, sizes = run.device, run.sizes
    source = device.random(2)
    model = make_model(device, sizes)
    sparse = kv.optim.Adagrad(model.embeddings, lr=0.01)
    dense = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    ids = [
        {name: power_law(source, sizes.batch, sizes.model_keys) for name in id_names(sizes)}
        for _ in range(sizes.sets)
    ]
    batches = []
    for keys in ids:
        numbers = {name: torch.rand(sizes.batch, device=device.device) for name in number_names(sizes)}
        labels = torch.randint(0, 2, (sizes.batch,), device=device.device).float()
        batches.append((kv.Batch(keys | numbers), labels))

    def step(number: int) -> None:
        batch, labels = batches[number % sizes.sets]
        with torch.autocast(device.device.type, torch.bfloat16):
            logits = model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()

    seconds = take_turns(device, {"step": step}, sizes.rounds, {"step": sizes.steps})["step"]
    least = step_bytes(sizes, unique_keys(ids))
    run.results.add(
        "dlrm_M_samples_per_s",
        "DLRM, bf16, input on the GPU",
        sizes.batch / seconds / 1e6,
        "M samples/s",
        Wanted(4.5),
        share=least / run.bandwidth / seconds,
    )
    run.results.note(dlrm_ms=seconds * 1e3, dlrm_unique_keys=unique_keys(ids))
