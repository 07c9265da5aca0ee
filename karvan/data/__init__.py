"""Data: files, frames and streams, read in splits and delivered as batches."""

from typing import TYPE_CHECKING

from karvan.argument_checks import publish
from karvan.data import synthetic
from karvan.data.columns.declarations import Column, Fixed, Raw, Varlen, infer
from karvan.data.columns.decoder import Decoder
from karvan.data.elastic_dataset import elastic
from karvan.data.errors import DataError
from karvan.data.formats import criteo
from karvan.data.formats.open_files import open_files, read_records
from karvan.data.formats.recordio import RecordIOWriter
from karvan.data.formats.tfrecord import TFRecordWriter
from karvan.data.identity import Identity
from karvan.data.in_memory import json_rows, open_frame, record_batches
from karvan.data.kafka import KafkaReader, KafkaSource
from karvan.data.leased_data import SharedData
from karvan.data.loading.loader import Loader
from karvan.data.loading.rank_shares import merge
from karvan.data.read import read
from karvan.data.source import Part, Source, Split
from karvan.data.streams import Stream, Window, Windows

if TYPE_CHECKING:
    from karvan.cluster.loader_stream import from_loaders


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
publish("karvan.data", {"karvan.cluster.loader_stream": "from_loaders"})
