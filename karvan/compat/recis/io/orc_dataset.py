"""`OrcDataset`: ORC files by a `kv.data.Loader`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from karvan.compat.recis.io.dataset_base import DatasetBase


class OrcDataset(DatasetBase):
    """Batches of ORC files; see `DatasetBase`."""

    def add_path(self, file_path: str | os.PathLike[str]) -> None:
        """Add a folder with files, also in folders below it, or a file."""
        self._add_path(os.fspath(file_path))

    def add_paths(self, file_paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add several paths."""
        for path in file_paths:
            self.add_path(path)

    @override
    def read_options(self) -> dict[str, Any]:
        return {"format": "orc"}
