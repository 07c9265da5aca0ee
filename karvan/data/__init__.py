"""Data: files, frames and streams, read in splits and delivered as batches."""

from karvan.data import criteo, synthetic
from karvan.data.columns import Column, Fixed, Raw, Varlen, infer
from karvan.data.decode import Decoder
from karvan.data.errors import DataError
from karvan.data.formats import open_files
from karvan.data.frames import open_frame
from karvan.data.identity import Identity
from karvan.data.kafka import KafkaReader
from karvan.data.loader import Loader
from karvan.data.position import merge
from karvan.data.read import read
from karvan.data.recordio import RecordWriter, read_records
from karvan.data.records import json_rows, record_batches
from karvan.data.source import Part, Source, Split
from karvan.data.stream import Stream
from karvan.data.windows import Window, Windows

__all__ = [
    "Column",
    "DataError",
    "Decoder",
    "Fixed",
    "Identity",
    "KafkaReader",
    "Loader",
    "Part",
    "Raw",
    "RecordWriter",
    "Source",
    "Split",
    "Stream",
    "Varlen",
    "Window",
    "Windows",
    "criteo",
    "infer",
    "json_rows",
    "merge",
    "open_files",
    "open_frame",
    "read",
    "read_records",
    "record_batches",
    "synthetic",
]
