"""An fsspec file system of local files that fails now and then, or is away altogether."""

import errno
import random
import threading

from fsspec.implementations.local import LocalFileSystem


class FlakyFileSystem(LocalFileSystem):
    """Fails with a chance of `chance` at every opening and every read; `away` is an error that all get."""

    cachable = False

    def __init__(self, chance=0.0, seed=0, kinds=(ConnectionResetError,)):
        super().__init__()
        self.chance = chance
        self.random = random.Random(seed)
        self.kinds = kinds
        self.away = None
        self.failures = 0
        self.lock = threading.Lock()

    def fail_perhaps(self, path):
        with self.lock:
            if self.away is not None:
                self.failures += 1
                raise self.away
            if self.random.random() < self.chance:
                self.failures += 1
                kind = self.random.choice(self.kinds)
                raise kind(f"{path}: the store did not answer")

    def info(self, path, **options):
        self.fail_perhaps(path)
        return super().info(path, **options)

    def ls(self, path, detail=False, **options):
        self.fail_perhaps(path)
        return super().ls(path, detail, **options)

    def _open(self, path, mode="rb", **options):
        self.fail_perhaps(path)
        return FlakyFile(super()._open(path, mode, **options), self, path)


class FlakyFile:
    def __init__(self, file, system, path):
        self._file, self._system, self._path = file, system, path

    def read(self, *size):
        self._system.fail_perhaps(self._path)
        return self._file.read(*size)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()


def io_error(path):
    """As of a network disk that has lost its server."""
    return OSError(errno.EIO, "Input/output error", path)
