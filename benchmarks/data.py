"""Files to ready batches, features included, beside pyarrow's own reading and torch's DataLoader.

Rows are Criteo-like: a label, 13 numbers, 26 ids. A pass reads all files once and turns them into batches
with the features of a DLRM (numbers log1p'd, ids as they are). pyarrow's figure is the time to tables of the
same files on all cores, without batches or features, the better of file by file and as one data set
(`to_table`); the loaders of torch read the same files with pandas and with pyarrow, file by file, and make
the same features. Of TFRecord and RecordIO files the limit is the time to read their bytes and to compute the
checksums that readers must check, on one thread. The training figure is that of a DLRM (`dlrm.py`) on some of
the same batches, held in memory: a loader should never be what training waits for. All are interleaved in one
run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import torch
from common import Report, interleave, medians, parser
from dlrm import training_pass

import karvan as kv
from karvan import _native
from karvan.data.formats import criteo

BATCH = 4096
FILES = 4
TRAINED = 12  # batches that are held in memory to train on
RECORDS = ("tfrecord", "recordio")
NUMBERS, IDS = list(criteo.INTEGERS), list(criteo.IDS)


def make_table(rows: int, seed: int) -> pa.Table:
    """Return Criteo-like rows."""
    rng = np.random.default_rng(seed)
    columns = {"label": rng.integers(0, 2, rows).astype(np.float32)}
    columns |= {name: rng.exponential(20.0, rows).astype(np.float32) for name in NUMBERS}
    columns |= {name: rng.zipf(1.2, rows) % (1 << 32) for name in IDS}
    return pa.table(columns)


def write_files(folder: Path, rows: int) -> None:
    """Write the same rows as Parquet and ORC, and fewer as Criteo's TSV and as records, in `FILES` files."""
    for number in range(FILES):
        table = make_table(rows // FILES, number)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=65536)
        pa_orc.write_table(table, folder / f"{number}.orc")
        part = table.slice(0, table.num_rows // 4)
        with kv.data.TFRecordWriter(folder / f"{number}.tfrecord") as writer:
            writer.write_rows(part)
        with kv.data.RecordIOWriter(folder / f"{number}.recordio", "none") as writer:
            writer.write_rows(part)
        hexadecimal = {name: [f"{value:08x}" for value in part[name].to_pylist()] for name in IDS}
        integers = {name: part[name].cast(pa.int64(), safe=False) for name in ["label", *NUMBERS]}
        options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        pa_csv.write_csv(pa.table(integers | hexadecimal), folder / f"{number}.tsv", options)


def features() -> kv.FeatureEngine:
    """Return the features of a DLRM."""
    return kv.FeatureEngine([kv.Feature(name).clip(0, None).log1p() for name in NUMBERS])


def open_loader(folder: Path, kind: str, engine: kv.FeatureEngine) -> kv.data.Loader:
    """Return karvan's loader of the files of a format."""
    if kind == "tsv":
        source, decode = criteo.open_logs(folder / "*.tsv"), kv.data.Decoder(criteo.columns())
        return kv.data.Loader(source, decode, BATCH, transform=engine)
    return kv.data.read(folder / f"*.{kind}", BATCH, transform=engine)


def karvan_pass(folder: Path, kind: str) -> Callable[[], None]:
    """Return a pass of karvan over the files of a format."""
    engine = features()

    def run() -> None:
        for _ in open_loader(folder, kind, engine):
            pass

    return run


def arrow_passes(folder: Path, kind: str) -> dict[str, Callable[[], None]]:
    """Return pyarrow's two ways to read the files of a format to tables: one by one, and as a data set."""
    paths = sorted(map(str, folder.glob(f"*.{kind}")))
    read = pa_csv.ReadOptions(column_names=["label", *NUMBERS, *IDS])
    convert = pa_csv.ConvertOptions(column_types={name: pa.string() for name in IDS})
    parse = pa_csv.ParseOptions(delimiter="\t", quote_char=False)
    single = {
        "parquet": pq.read_table,
        "orc": pa_orc.read_table,
        "tsv": lambda path: pa_csv.read_csv(path, read, parse, convert),
    }[kind]
    form = ds.CsvFileFormat(parse, convert_options=convert, read_options=read) if kind == "tsv" else kind
    return {
        f"pyarrow_{kind}": lambda: [single(path) for path in paths] and None,
        f"pyarrow_{kind}_dataset": lambda: ds.dataset(paths, format=form).to_table() and None,
    }


def checksum_pass(folder: Path, kind: str) -> Callable[[], None]:
    """Return a pass that reads the bytes of files of records and computes their checksums, no more."""
    checksum = {"tfrecord": _native.masked_crc32c, "recordio": _native.crc32}[kind]

    def run() -> None:
        for path in sorted(folder.glob(f"*.{kind}")):
            with path.open("rb") as file:
                while block := file.read(1 << 21):
                    checksum(block)

    return run


class Files(torch.utils.data.IterableDataset):
    """Batches for torch's DataLoader: each file read whole, then cut."""

    def __init__(self, folder: Path, with_pandas: bool) -> None:
        self._paths = sorted(folder.glob("*.parquet"))
        self._with_pandas = with_pandas

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for path in self._paths:
            if self._with_pandas:
                frame = pd.read_parquet(path)
                columns = {name: torch.from_numpy(frame[name].to_numpy(copy=True)) for name in frame.columns}
            else:
                table = pq.read_table(path)
                arrays = {name: table[name].to_numpy() for name in table.column_names}
                columns = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
            rows = len(columns["label"])
            for start in range(0, rows, BATCH):
                batch = {name: column[start : start + BATCH] for name, column in columns.items()}
                for name in NUMBERS:
                    batch[name] = torch.log1p(batch[name].clip(min=0))
                yield batch


def torch_pass(folder: Path, with_pandas: bool) -> Callable[[], None]:
    """Return a pass of torch's DataLoader over the Parquet files."""
    loader = torch.utils.data.DataLoader(Files(folder, with_pandas), batch_size=None)

    def run() -> None:
        for _ in loader:
            pass

    return run


def hashing(report: Report) -> None:
    """Add the rate of string hashing on one thread."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 33, 200_000)
    values = torch.from_numpy(rng.integers(97, 123, int(lengths.sum()), dtype=np.uint8))
    words = kv.Ragged(values, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])))
    for name, hash_words in (("farm", kv.ids.farm), ("murmur", kv.ids.murmur)):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            hash_words(words)
            times.append(time.perf_counter() - start)
        report.figures[f"{name}_hash_mb_per_s"] = len(values) / min(times) / 1e6


def synthetic(report: Report) -> None:
    """Add the rates at which synthetic click logs are drawn and written, on all cores."""
    rows = 250_000 if report.quick else 1_000_000
    for kind in ("parquet", "orc"):
        log = kv.data.synthetic.ClickLog(seed=1)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            log.write(folder, rows, kind, files=2)
            report.figures[f"synthetic_{kind}_rows_per_s"] = rows / (time.perf_counter() - start)


def main() -> None:
    """Write files, time all candidates, print the tables and write the JSON."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    report = Report("data", args.quick)
    rows = 200_000 if args.quick else 2_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, rows)
        candidates = {f"karvan_{kind}": karvan_pass(folder, kind) for kind in ("parquet", "orc", "tsv")}
        for kind in ("parquet", "orc", "tsv"):
            candidates |= arrow_passes(folder, kind)
        for kind in RECORDS:
            candidates[f"karvan_{kind}"] = karvan_pass(folder, kind)
            candidates[f"checksums_{kind}"] = checksum_pass(folder, kind)
        megabytes = {
            kind: sum(path.stat().st_size for path in folder.glob(f"*.{kind}")) / 1e6 for kind in RECORDS
        }
        candidates |= {
            "torch_loader_pandas": torch_pass(folder, with_pandas=True),
            "torch_loader_pyarrow": torch_pass(folder, with_pandas=False),
        }
        held = list(islice(open_loader(folder, "parquet", features()), TRAINED))
        candidates["training"] = training_pass(held, NUMBERS, IDS)
        seconds = medians(interleave(candidates, rounds=5, burst=2))
    fewer = ("tsv", *RECORDS)
    read = {name: rows // 4 if any(kind in name for kind in fewer) else rows for name in seconds}
    read["training"] = sum(batch.samples for batch in held)
    for name, each in seconds.items():
        report.add_timing(name, each, read[name])
    hashing(report)
    synthetic(report)
    kinds = {"parquet": "parquet", "orc": "orc", "csv": "tsv"}
    for name, kind in kinds.items():
        peer = min(seconds[f"pyarrow_{kind}"], seconds[f"pyarrow_{kind}_dataset"])
        report.ratios[f"{name}_vs_pyarrow"] = peer / seconds[f"karvan_{kind}"]
    report.ratios["parquet_vs_pandas_loader"] = seconds["torch_loader_pandas"] / seconds["karvan_parquet"]
    for kind in RECORDS:
        report.figures[f"{kind}_mb_per_s"] = megabytes[kind] / seconds[f"karvan_{kind}"]
        report.ratios[f"{kind}_vs_checksums"] = seconds[f"checksums_{kind}"] / seconds[f"karvan_{kind}"]
    trained = read["training"] / seconds["training"]
    for name, kind in {**kinds, "tfrecord": "tfrecord", "recordio": "recordio"}.items():
        report.ratios[f"{name}_vs_training"] = read[f"karvan_{kind}"] / seconds[f"karvan_{kind}"] / trained
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
