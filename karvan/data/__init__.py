"""Data: files, frames and streams, read in splits and delivered as batches."""

from typing import TYPE_CHECKING

from karvan.argument_checks import publish
from karvan.data import synthetic
from karvan.data.columns.declarations import Column, Fixed, Raw, Varlen, infer
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.formats import criteo
from karvan.data.formats.open_files import open_files, read_records
from karvan.data.formats.records.recordio import RecordIOWriter
from karvan.data.formats.records.tfrecord import TFRecordWriter
from karvan.data.identity import Identity
from karvan.data.in_memory import open_frame
from karvan.data.leasing.dataset import elastic
from karvan.data.leasing.shared_data import SharedData
from karvan.data.loading.loader import Loader
from karvan.data.loading.position import merge
from karvan.data.read import read
from karvan.data.source import Part, Source, Split
from karvan.data.streaming.kafka import KafkaReader, KafkaSource
from karvan.data.streaming.prefetch_stream import Stream
from karvan.data.streaming.record_batches import json_rows, record_batches
from karvan.data.streaming.time_windows import Window, Windows

if TYPE_CHECKING:
    from karvan.cluster.streams.loader_stream import from_loaders

__all__ = [
    "read",
    "Fixed",
    "Varlen",
    "Raw",
    "Column",
    "infer",
    "from_loaders",
    "elastic",
    "open_files",
    "open_frame",
    "Windows",
    "Window",
    "KafkaReader",
    "KafkaSource",
    "json_rows",
    "record_batches",
    "Stream",
    "Loader",
    "SharedData",
    "merge",
    "Decoder",
    "Source",
    "Part",
    "Split",
    "Identity",
    "DataError",
    "TFRecordWriter",
    "RecordIOWriter",
    "read_records",
    "synthetic",
    "criteo",
]

# `from_loaders` reads data, so users look for it here. Its code belongs to the cluster, a higher layer that
# nothing in this package may depend on, so it is imported only on first use.
publish("karvan.data", {"karvan.cluster.streams.loader_stream": "from_loaders"})
