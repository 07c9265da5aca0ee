"""Tables on a GPU: lookups, updates and training beside the bytes they move, and beside torch's embeddings.

Builds, checks and times everything in one run, on one GPU. It needs torch, triton and numpy, and Karvan's
source. The line that reads Parquet also needs pyarrow and the native core; without them it is skipped, and
says so.

    python benchmarks/gpu.py --quick
    python benchmarks/gpu.py --json out/gpu.json --trace out/gpu_trace.json
    python benchmarks/gpu.py --only step,tier
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from common import parser
from gpu_lines import correctness, dlrm_step, host_tier, lookups, steps
from gpu_lines.device import Device
from gpu_lines.results import Results
from gpu_lines.run import Run
from gpu_lines.sizes import QUICK, Sizes

import karvan.native


def parquet(run: Run) -> None:
    """See `gpu_lines/training.py`, which imports pyarrow."""
    lacking = [name for name in ("pyarrow",) if find_spec(name) is None]
    if not karvan.native.is_built():
        lacking.append("the native core of karvan")
    if lacking:
        run.results.skip("parquet", f"needs {' and '.join(lacking)}")
        return
    from gpu_lines import training

    training.parquet(run)


LINES: dict[str, Callable[[Run], None]] = {
    "index": lookups.index,
    "gather": lookups.gather,
    "step": steps.ten_tables,
    "w26": steps.beside_embedding_bags,
    "dlrm": dlrm_step.dlrm,
    "tier": host_tier.host_tier,
    "parquet": parquet,  # last: it ends with a trace, which slows down what comes after it
}


def chosen(text: str) -> list[str]:
    """The lines that `--only` names."""
    names = text.split(",")
    if any(name not in LINES for name in names):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(LINES)}, got {text!r}")
    return [name for name in LINES if name in names]


def measure(run: Run, names: Sequence[str]) -> None:
    """Measure lines; one that fails does not end the others.

    What is known is written after each line: a run that is ended early leaves it.
    """
    run.results.note(gpu=run.device.name, torch=torch.__version__)
    _ = run.bandwidth  # measured before anything else takes memory
    for name in names:
        run.device.release()
        begin = time.perf_counter()
        try:
            LINES[name](run)
        except Exception as error:
            traceback.print_exc()
            run.results.fail(name, error)
        run.results.note(**{f"{name}_took_s": time.perf_counter() - begin})
        run.results.save()


def main() -> None:
    """Run everything, or what was chosen."""
    arguments = parser(str(__doc__))
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments.add_argument(
        "--only", metavar="NAMES", type=chosen, default=list(LINES), help=f"some of {','.join(LINES)}"
    )
    arguments.add_argument(
        "--trace", metavar="PATH", help="write a trace of training from Parquet to PATH, for Perfetto"
    )
    options = arguments.parse_args()
    if options.trace and "parquet" not in options.only:
        arguments.error("--trace is of the line parquet, which --only leaves out")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py expects a GPU, and torch finds none here: see karvan doctor.")
    warnings.filterwarnings("ignore", message=".*Sparse invariant checks.*")  # of torch
    results = Results(options.quick, options.json)
    run = Run(Device(), QUICK if options.quick else Sizes(), results, options.trace)
    correctness.check(run.device)
    measure(run, options.only)
    results.show()
    if results.failed:
        sys.exit(f"benchmarks/gpu.py: {', '.join(results.failed)} failed, see above.")


if __name__ == "__main__":
    main()
