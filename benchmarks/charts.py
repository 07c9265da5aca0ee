"""The charts of README and the documentation, drawn from what the benchmarks measured.

Each chart is a file of docs/images; its numbers are those of benchmarks/results, which the benchmarks write:

    python benchmarks/sparse_step.py --only w1,w2 --json benchmarks/results/sparse_step_16_cores.json
    python benchmarks/charts.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
WIDTH, MARGIN, LABELS, BAR, GAP = 520, 20, 122, 20, 8
LONGEST = WIDTH - 2 * MARGIN - LABELS - 112  # of a bar; its value stands to the right of it
BATCH, GPU_BATCH = 4096, 65_536

STYLE = """
.card{fill:#fff;stroke:#d5dbdf}
.head{font:600 15px sans-serif;fill:#1c2b33}.sub{font:12px sans-serif;fill:#5a6b75}
.label,.value{font:13px sans-serif;fill:#1c2b33}.ours{fill:#00897b}.theirs{fill:#b3bec4}
@media(prefers-color-scheme:dark){.card{fill:#1e252a;stroke:#37434a}.head,.label,.value{fill:#e6ecef}
.sub{fill:#9fb0b9}.ours{fill:#26a69a}.theirs{fill:#5c6b73}}
"""


@dataclass(frozen=True)
class Panel:
    """Bars under one heading. The first is Karvan's; the others say how many times as fast it is."""

    heading: str
    remark: str
    bars: dict[str, float]


def chart(title: str, panels: list[Panel]) -> str:
    """The SVG of some panels, one below the other; higher values are better."""
    parts, y = [], MARGIN
    for panel in panels:
        parts.append(_text("head", MARGIN, y + 14, panel.heading))
        parts.append(_text("sub", MARGIN, y + 32, panel.remark))
        y += 44
        ours = next(iter(panel.bars.values()))
        for name, value in panel.bars.items():
            is_ours = name == "Karvan"
            length = max(2.0, LONGEST * value / max(panel.bars.values()))
            parts.append(_text("label", MARGIN, y + 15, name))
            parts.append(
                f'<rect class="{"ours" if is_ours else "theirs"}" x="{MARGIN + LABELS}" y="{y}" '
                f'width="{length:.1f}" height="{BAR}" rx="3"/>'
            )
            times = "" if is_ours else f"  (Karvan {_times(ours / value)})"
            parts.append(_text("value", MARGIN + LABELS + length + 8, y + 15, f"{_count(value)}{times}"))
            y += BAR + GAP
        y += 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{y - 1}" rx="10"/>'
    return (
        "\n".join(
            [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", card, *parts, "</svg>"]
        )
        + "\n"
    )


def figures(name: str) -> dict[str, float]:
    """The figures that a benchmark wrote into benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def step(cores: int, workload: str, peers: dict[str, str]) -> dict[str, float]:
    """Samples a second of a sparse step: Karvan on all cores, each peer with its better number of threads."""
    found = figures(f"sparse_step_{cores}_cores")

    def rate(name: str, threads: int) -> float:
        return found[f"{workload}_{name}_{threads}t_samples_per_s"]

    best = {label: max(rate(name, threads) for threads in (1, cores)) for label, name in peers.items()}
    return {"Karvan": rate("karvan", cores), **best}


def charts() -> dict[str, str]:
    """All charts, by the name of their file."""
    gpu, training = figures("gpu_h200"), figures("train_16_cores")
    everyone = {"FBGEMM": "fbgemm", "TorchRec": "torchrec", "EmbeddingBag": "torch"}
    tables = "26 tables, dim 16, 20 M rows, Adagrad"
    on_gpu = {
        label: GPU_BATCH / gpu[f"w26_{name}ms"] * 1e3
        for label, name in (
            ("Karvan", ""),
            ("FBGEMM", "fbgemm_"),
            ("TorchRec", "torchrec_"),
            ("EmbeddingBag", "embedding_bags_"),
        )
    }
    unpooled = {"Karvan": 1e3 / gpu["step_ms"], "FBGEMM": 1e3 / gpu["step_fbgemm_ms"]}

    def whole(precision: str) -> dict[str, float]:
        names = {"Karvan": "karvan", "EmbeddingBag": "embeddingbag"}
        return {label: training[f"{name}_{precision}_samples_per_s"] for label, name in names.items()}

    cpu_step = Panel("Sparse step on 16 CPU cores", f"samples/s: {tables}", step(16, "w1", everyone))
    gpu_step = Panel("Sparse step on one H200 GPU", "samples/s: 26 tables, dim 128, Adagrad", on_gpu)
    fp32 = Panel(
        "Training a DLRM on 16 CPU cores, fp32", "samples/s, from Parquet to updated rows", whole("fp32")
    )
    return {
        "speed.svg": chart("Samples per second of Karvan and its peers", [cpu_step, gpu_step, fp32]),
        "speed_cpu.svg": chart(
            "Sparse steps on a CPU",
            [
                cpu_step,
                Panel("The same on 2 cores", f"samples/s: {tables}", step(2, "w1", everyone)),
                Panel(
                    "200 ids a sample, pooled, 16 cores",
                    "samples/s: 2 tables, dim 32, 10 M rows",
                    step(16, "w2_pooled", {"FBGEMM": "fbgemm"}),
                ),
                Panel(
                    "200 ids a sample, not pooled, 16 cores",
                    "samples/s: 2 tables, dim 32, 10 M rows",
                    step(16, "w2_unpooled", {"FBGEMM": "fbgemm"}),
                ),
            ],
        ),
        "speed_gpu.svg": chart(
            "Sparse steps on a GPU",
            [
                gpu_step,
                Panel("10 tables, not pooled, Adam", "steps/s: dim 128, 1,048,570 lookups a step", unpooled),
            ],
        ),
        "speed_training.svg": chart(
            "Whole training on a CPU",
            [fp32, Panel("The same in bf16", "samples/s, from Parquet to updated rows", whole("bf16"))],
        ),
    }


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _times(ratio: float) -> str:
    return f"{ratio:.0f}\u00d7" if ratio >= 10 else f"{ratio:.1f}\u00d7"


def _count(value: float) -> str:
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def main() -> None:
    """Write all charts."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, svg in charts().items():
        (IMAGES / name).write_text(svg)
        print(f"docs/images/{name}")


if __name__ == "__main__":
    main()
