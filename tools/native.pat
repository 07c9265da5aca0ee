# Element types that nanobind cannot know. Each entry replaces the matching member of the stub.

_native.Table.stats$:
    def stats(self) -> dict[str, int]: ...

_native.Table.lookup$:
    def lookup(self, keys: NDArray[numpy.int64], counts: NDArray[numpy.uint32], training: bool, step: int, now: float) -> tuple[NDArray[numpy.float32], int]: ...

_native.Table.snapshot$:
    def snapshot(self, part: int = 0, parts: int = 1) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], NDArray[numpy.uint32], NDArray[numpy.uint32]]: ...

_native.Gradients.keys_and_values$:
    def keys_and_values(self, slot: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32]]: ...

_native.Plan.unique$:
    def unique(self, slot: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.uint32]]: ...

_native.Capture.part$:
    def part(self, part: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], NDArray[numpy.uint32], NDArray[numpy.uint32]]: ...

_native.crc32$:
    def crc32(data: NDArray[numpy.uint8] | memoryview | bytes, before: int = 0) -> int:
        """CRC-32 as in gzip, of data after bytes whose checksum is `before`."""

_native.masked_crc32c$:
    def masked_crc32c(data: NDArray[numpy.uint8] | bytes) -> int:
        """CRC-32C, masked as TFRecord and Snappy's frames store it."""

_native.find_tfrecords$:
    def find_tfrecords(data: NDArray[numpy.uint8] | bytes, verify: bool) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], int, str]:
        """The starts and lengths of the records, the byte after the last, and what is wrong there."""

_native.find_chunk_records$:
    def find_chunk_records(data: NDArray[numpy.uint8] | bytes, count: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], int, str]:
        """The starts and lengths of the records, the byte after the last, and what is wrong there."""

_native.decode_examples$:
    def decode_examples(data: NDArray[numpy.uint8], starts: NDArray[numpy.int64], lengths: NDArray[numpy.int64], names: Sequence[str], kinds: Sequence[str], all_named: bool) -> tuple[list[tuple[NDArray[numpy.uint8], NDArray[numpy.int32], NDArray[numpy.generic], NDArray[numpy.int32]]], tuple[str, int, bytes, str] | None]:
        """Of each named feature: whether records have it, the offsets of their values, the values, and the offsets of bytes in them; and what is wrong: a word, the record, the feature, the kind that it has."""

_native.summarise_examples$:
    def summarise_examples(data: NDArray[numpy.uint8], starts: NDArray[numpy.int64], lengths: NDArray[numpy.int64]) -> tuple[list[tuple[bytes, str, bool]], tuple[str, int, bytes, str] | None]:
        """The features of the records: name, kind, and whether no record has several values; and what is wrong."""

_native.encode_examples$:
    def encode_examples(rows: int, names: Sequence[str], kinds: Sequence[str], present: Sequence[NDArray[numpy.uint8]], offsets: Sequence[NDArray[numpy.int32]], values: Sequence[NDArray[numpy.uint8]], byte_offsets: Sequence[NDArray[numpy.int32]]) -> tuple[NDArray[numpy.uint8], NDArray[numpy.int64]]:
        """A tf.Example for each row, one after the other, and their bounds."""
