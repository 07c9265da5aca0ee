"""A small source over a table, and helpers that the loader's tests share."""

import threading

import pyarrow as pa
import torch

from karvan import Batch
from karvan.data.source import Part, Split


class TableSource:
    """Parts of the given sizes; column `record` counts through all of them. Read in pieces of `piece`."""

    def __init__(self, sizes, piece=7):
        self.schema = pa.schema([("record", pa.int64())])
        self.piece = piece
        self.lock = threading.Lock()
        self.read_records = 0
        self.reads = []
        self._tables = {}
        first = 0
        for number, size in enumerate(sizes):
            self._tables[f"part-{number}"] = pa.table({"record": pa.array(range(first, first + size))})
            first += size
        self.total = first

    def parts(self):
        return [Part(path, len(table)) for path, table in self._tables.items()]

    def read(self, split: Split):
        with self.lock:
            self.reads.append(split)
        table = self._tables[split.path].slice(split.first, split.count).combine_chunks()
        for batch in table.to_batches(max_chunksize=self.piece):
            with self.lock:
                self.read_records += len(batch)
            yield batch


def decode(records: pa.RecordBatch) -> Batch:
    return Batch({"record": torch.tensor(records.column("record").to_pylist(), dtype=torch.int64)})


def records_of(batches):
    return [record for batch in batches for record in batch["record"].tolist()]


def no_threads_left():
    """Whether the loader's threads have ended, within a generous time."""
    for thread in threading.enumerate():
        if thread.name == "karvan-data":
            thread.join(timeout=60)
    return not any(thread.name == "karvan-data" for thread in threading.enumerate())
