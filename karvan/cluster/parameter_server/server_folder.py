"""Where a parameter server may write: below the job's checkpoint folder, and nowhere else.

Trainers name the folder of each save. A server does not trust them: a path that leads out of its own
folder, by `..` or through a symbolic link, is refused, so a caller cannot make it write into other folders of
the user who runs the job. Links inside of a save's folder must not lead out either. Rows are read from any
checkpoint that the server's user may read (`fill`), because a run may load another run's checkpoint; only
`restore`, for a server that replaces a lost one, is limited to the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.format.atomic_folder import try_writing
from karvan.checkpoint.format.table_arrays import folder_of
from karvan.job.checkpoint_url import local_path, shown, url_of, without_secrets


class ServerFolder:
    """The checkpoint folder of server `name`; None: it may not write at all."""

    def __init__(self, name: str, root: str | os.PathLike[str] | None) -> None:
        self._name = name
        self._root = Path(os.path.abspath(local_path(root))) if root else None

    def target(self, folder: str, tables: Iterable[str]) -> Path:
        """The folder of a save, with links resolved; a ValueError if it, or a table's, leads outside."""
        found = self._inside(folder)
        if found == self._existing_root():
            raise self._refusal(folder)
        for table in tables:
            path = found / folder_of(table)
            if not path.resolve().is_relative_to(found):
                raise self._refusal(str(path))
        return found

    def check(self, folder: str) -> Path:
        """The folder of a run, with links resolved; a ValueError says why this server cannot save into it."""
        found = self._inside(folder)
        if url_of(found) is not None:
            try:
                try_writing(found)
            except CheckpointError as error:
                raise ValueError(f"{self._name}: {error}") from error
            return found
        if not found.is_dir():
            raise ValueError(
                f"{self._name} expected to see {folder} of the trainer, got nothing: checkpoints must be "
                "on storage that all roles share."
            )
        if not os.access(found, os.W_OK | os.X_OK):
            raise ValueError(f"{self._name} expected to be allowed to write into {folder}, but it is not.")
        return found

    def _inside(self, folder: str) -> Path:
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise ValueError(f"{self._name} expected the path of a folder, got {folder!r}.")
        if "://" in folder and url_of(self._existing_root()) is None:
            raise self._refusal(folder)
        found = local_path(folder).resolve()
        if not found.is_relative_to(self._existing_root()):
            raise self._refusal(folder)
        return found

    def _existing_root(self) -> Path:
        if self._root is None:
            raise ValueError(
                f"{self._name} has no checkpoint folder, so it cannot save: set `checkpoints` of the job, or "
                "start it with `karvan role parameter-server --checkpoints FOLDER` (KARVAN_CHECKPOINTS)."
            )
        return self._root.resolve()

    def _refusal(self, folder: str) -> ValueError:
        return ValueError(
            f"{self._name} expected a folder below {shown(self._root)}, the job's checkpoint folder, got "
            f"{without_secrets(folder)}. "
            "Save there, or name another folder in `checkpoints` of the job (--checkpoints of `karvan role`)."
        )
