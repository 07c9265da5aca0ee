"""`karvan version`; and `karvan doctor`: what this machine has, what is slow on it, and what to do."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from typer import Option

import karvan
from karvan.cli.output import FAILED, JSON_PATH, OK, bytes_text, console, disk_rate, write_json
from karvan.system_limits import available_memory, limits

# Looked up without importing them.
_SHOWN = ("torch", "numpy", "pyarrow")


def version(json_path: str | None = JSON_PATH) -> int:
    """Show the versions of Karvan, Python and main packages.

    \b
    Examples:
      karvan version
      karvan version --json -
    """
    versions = {"karvan": karvan.__version__, "python": platform.python_version()}
    versions |= {name: installed(name) or "not installed" for name in _SHOWN}
    if not write_json(json_path, versions):
        print(
            "karvan",
            ", ".join([karvan.__version__, *(f"{name} {text}" for name, text in list(versions.items())[1:])]),
        )
    return OK


def installed(name: str) -> str | None:
    """The version of a package, if it is installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_COLOURS = {"ok": "green", "slow": "yellow", "missing": "red", "optional": "dim"}

# Package → its purpose, and how to install it.
_NEEDED = (
    *("torch", "numpy", "pyarrow", "fsspec", "rich", "typer", "pydantic", "PyYAML"),
    "cryptography",
)
_EXTRAS = {
    "tensorboard": ("logs for TensorBoard", "pip install 'karvan[monitor]'"),
    "pyodps": ("reading tables of MaxCompute", "pip install 'karvan[odps]'"),
    "confluent-kafka": ("reading from Kafka", "pip install 'karvan[kafka]'"),
    "ray": ("jobs on a Ray cluster", "pip install 'karvan[ray]'"),
    "pandas": ("trainer.history as a DataFrame", "pip install pandas"),
}
_NEWEST_TORCH = "2.13"  # that the tests use
_GLIBC = (2, 28)  # that wheels of torch need


@dataclass(frozen=True)
class Finding:
    """One fact about this machine: ok, slow, missing, or optional and absent; and what to do about it."""

    what: str
    state: str
    value: str
    advice: str = ""

    @classmethod
    def judged(cls, what: str, value: str, state: str, advice: str, when: object) -> Finding:
        """A finding that is ok, unless there is a reason for this state and this advice."""
        return cls(what, state, value, advice) if when else cls(what, "ok", value)


def doctor(
    folder: Path = Option(Path(), help="Where runs are written: its disk is measured."),
    json_path: str | None = JSON_PATH,
) -> int:
    """Check this machine: what is installed, what is slow and why, what is missing and how to get it.

    The exit code is 1 if something that Karvan needs is missing.

    \b
    Examples:
      karvan doctor
      karvan doctor --folder /data/runs
      karvan doctor --json -
    """
    findings = [finding for check in _CHECKS for finding in _findings_of(check, folder)]
    if not write_json(json_path, findings):
        _show(findings)
    return FAILED if any(finding.state == "missing" for finding in findings) else OK


def _findings_of(check: Callable[[Path], Iterator[Finding]], folder: Path) -> Iterator[Finding]:
    """What a check finds; a package that is missing or broken does not keep others from being checked."""
    try:
        yield from check(folder)
    except (ImportError, OSError) as error:
        what = check.__name__.strip("_").replace("_", " ")
        yield Finding(what, "missing", f"{type(error).__name__}: {error}", "See the packages above.")


def _show(findings: list[Finding]) -> None:
    """A line for each, folded on a terminal, with the advice below it."""
    from rich.text import Text

    out = console()
    states, names = (
        max(map(len, column)) for column in zip(*((f.state, f.what) for f in findings), strict=True)
    )
    indent = states + names + 4
    width = max(40, out.width - indent)
    for finding in findings:
        lines = [line for text in (finding.value, finding.advice) for line in textwrap.wrap(text, width)]
        state = Text(finding.state.ljust(states), style=_COLOURS[finding.state])
        first, *rest = lines or [""]
        out.print(Text.assemble(state, f"  {finding.what.ljust(names)}  {first}"))
        for line in rest:
            out.print(Text(" " * indent + line))
    counts = {state: sum(finding.state == state for finding in findings) for state in ("missing", "slow")}
    out.print(f"{counts['missing']} missing, {counts['slow']} slow.")


def _platform(folder: Path) -> Iterator[Finding]:
    machine, (libc, version) = platform.machine(), platform.libc_ver()
    text = f"{platform.system()} {machine}, {libc or 'no glibc'} {version}".strip()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    advice = ""
    if machine not in ("x86_64", "aarch64"):
        advice = "Karvan is tested on x86_64 and aarch64 only."
    elif libc != "glibc" or numbers < _GLIBC:
        needed = ".".join(map(str, _GLIBC))
        advice = f"Wheels of torch need glibc {needed} or later. Use a newer system, or an image with glibc."
    yield Finding.judged("platform", text, "optional", advice, when=advice)
    yield Finding("python", "ok", platform.python_version())


def _packages(folder: Path) -> Iterator[Finding]:
    needed = _needed_versions()
    for name in _NEEDED:
        version, least = installed(name), needed.get(name.lower(), "")
        if version is None:
            yield Finding(name, "missing", "not installed", f"pip install {name}")
        elif _numbers(version) < _numbers(least):
            advice = f"Karvan needs at least {least}: pip install '{name}>={least}'"
            yield Finding(name, "missing", version, advice)
        else:
            is_newer = name == "torch" and _numbers(version)[:2] > _numbers(_NEWEST_TORCH)
            advice = f"Karvan is tested with torch {least} to {_NEWEST_TORCH}." if is_newer else ""
            yield Finding(name, "ok", version, advice)
    for name, (purpose, how) in _EXTRAS.items():
        version = installed(name)
        missing, advice = "not installed", f"For {purpose}: {how}"
        yield Finding.judged(name, version or missing, "optional", advice, when=version is None)


def _needed_versions() -> dict[str, str]:
    """The least version of each package that Karvan declares, by its name in lower case."""
    matches = (
        re.match(r"([\w-]+)>=([\d.]+)$", requirement) for requirement in metadata.requires("karvan") or ()
    )
    return {match[1].lower(): match[2] for match in matches if match is not None}


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu becomes (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _native(folder: Path) -> Iterator[Finding]:
    try:
        from karvan import _native
    except ImportError as error:
        advice = "Reinstall Karvan from its wheel or its source: pip install --force-reinstall --no-deps PATH"
        if "GLIBC" in str(error):
            advice = "This system's glibc is older than the wheel's: build from the source, pip install PATH"
        yield Finding("native core", "missing", str(error), advice)
        return
    used, names = _native.kernels(), _native.kernel_names()
    if used != names[0]:
        yield Finding("kernels", "slow", used, f"This CPU can run '{names[0]}', but others were selected.")
    elif used == "plain" and platform.machine() == "x86_64":
        advice = "This CPU has neither AVX2 nor AVX-512. Karvan's faster kernels need one of them."
        yield Finding("kernels", "slow", used, advice)
    else:
        yield Finding("kernels", "ok", f"{used} (of {', '.join(names)})")


def _cores(folder: Path) -> Iterator[Finding]:
    import torch

    from karvan import get_num_threads

    total, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = _cpu_limit()
    allowed = min(usable, max(1, round(limit))) if limit else usable
    text = f"{usable} of {total}" + (f", at most {limit:g} at a time" if limit and limit < usable else "")
    advice = "This process may not use all cores (affinity or cgroup limit)." if allowed < total else ""
    yield Finding("cores", "ok", text, advice)
    for what, count, how in (
        ("torch threads", torch.get_num_threads(), "torch.set_num_threads or OMP_NUM_THREADS"),
        ("karvan threads", get_num_threads(), "kv.set_num_threads"),
    ):
        why = f"There are {allowed} cores"
        if count > allowed:
            why = f"More threads than cores ({allowed}) wait for each other"
        yield Finding.judged(what, str(count), "slow", f"{why}: {how}.", when=count != allowed)


def _cpu_limit() -> float | None:
    """The number of cores whose time a container may use."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _bf16(folder: Path) -> Iterator[Finding]:
    from karvan.train.precision import fast_bf16

    is_fast = fast_bf16()
    value = "native instructions" if is_fast else "no native instructions"
    advice = "precision='bf16' is not faster usable than fp32; use fp32."
    yield Finding.judged("bf16 on the CPU", value, "slow", advice, when=not is_fast)


def _gpu(folder: Path) -> Iterator[Finding]:
    import torch

    from karvan.distributed.connection import missing_cuda

    triton, why = _triton()
    if not torch.cuda.is_available():
        missing = f"none: {missing_cuda()}" + ("" if triton else f"; Triton: {why}")
        yield Finding("GPU", "optional", missing, f"{_ON_GPU} A model's dense part is faster on one, too.")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        memory = f"{bytes_text(free)} of {bytes_text(total)} free"
        text = f"{about.name}, compute capability {about.major}.{about.minor}, {memory}"
        yield Finding(f"GPU {number}", "ok", text)
    advice = f"pip install triton. {_ON_GPU}"
    yield Finding.judged("Triton", triton or why, "optional", advice, when=not triton)


_ON_GPU = 'Tables on a GPU, kv.connect("cuda"), need a GPU, a torch that is built with CUDA, and Triton.'


def _triton() -> tuple[str, str]:
    """The version of Triton, or why it cannot be imported."""
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # a package that is there, but does not fit, raises many kinds
        return "", f"cannot be imported ({error})" if installed("triton") else "not installed"
    return str(triton.__version__), ""


def _shared_memory(folder: Path) -> Iterator[Finding]:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        total = 0
    advice = (
        "Several GPUs of a machine (NCCL) and DataLoaders of torch with workers share memory there: "
        "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm as root."
    )
    value = bytes_text(total) if total else "not there"
    yield Finding.judged("/dev/shm", value, "slow", advice, when=total < 2**30)


def _huge_pages(folder: Path) -> Iterator[Finding]:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        chosen = path.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        advice = "Large tables are faster with transparent huge pages."
        yield Finding("huge pages", "optional", "unknown", advice)
        return
    advice = f"Lookups in large tables miss the TLB; as root: echo madvise > {path}"
    yield Finding.judged("huge pages", chosen, "slow", advice, when=chosen == "never")


def _limits(folder: Path) -> Iterator[Finding]:
    for limit in limits():
        value = limit.text(limit.hard)
        yield Finding.judged(limit.name, value, "missing", limit.advice, when=not limit.enough)


def _memory(folder: Path) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = available_memory()
    row = 162  # bytes of a row of dim 16 with Adagrad, index included
    text = f"{bytes_text(free)} of {bytes_text(total)} free"
    if free < 2**30:
        advice = "Little memory is left; tables that do not fit make the system swap or kill processes."
        yield Finding("memory", "slow", text, advice)
    else:
        yield Finding("memory", "ok", f"{text}: about {free // row / 1e6:,.0f} M rows of dim 16 with Adagrad")


def _disk(folder: Path) -> Iterator[Finding]:
    what = f"disk at {folder}"
    if not folder.is_dir():
        yield Finding(what, "missing", "no such folder", "Make it, or give another --folder.")
        return
    try:
        rate = disk_rate(folder)
    except OSError as error:
        yield Finding(what, "missing", str(error), "Checkpoints cannot be written there.")
        return
    advice = "Checkpoints are slow; put runs on a faster disk, or save deltas."
    yield Finding.judged(what, f"{rate / 1e6:,.0f} MB/s written", "slow", advice, when=rate < 50e6)


_CHECKS: list[Callable[[Path], Iterator[Finding]]] = [
    *(_platform, _packages, _native, _cores, _bf16, _gpu),
    *(_shared_memory, _huge_pages, _limits, _memory, _disk),
]
