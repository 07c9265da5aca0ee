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
