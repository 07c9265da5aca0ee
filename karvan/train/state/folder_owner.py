"""The folder that a fit saves to belongs to it; with several ranks, rank 0 owns it for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from karvan.checkpoint.object_store.files import lease_object
from karvan.distributed import Connection
from karvan.owner import OwnerError, Ownership, own


def own_together(folder: Path, connection: Connection, group: str = "") -> Ownership | None:
    """Own a folder, on all ranks or on none: they all raise an OwnerError if another run does.

    group: the name of a group of which one trainer after the other may own the folder.
    """
    owned: Ownership | None = None
    refused: str | None = None
    if connection.rank == 0:
        try:
            owned = own(folder, group, lease_object(folder))
        except OwnerError as error:
            if connection.world_size == 1:
                raise
            refused = str(error)
    if connection.world_size > 1:
        refused = connection.main.gather_json(refused)[0]
        if refused is not None:
            raise OwnerError(refused)
    return owned


@contextmanager
def owned_folder(folder: Path | None, connection: Connection, group: str = "") -> Iterator[None]:
    """Own the folder of checkpoints, if there is one, while inside; see `own_together`."""
    owned = None if folder is None else own_together(folder, connection, group)
    try:
        yield
    finally:
        if owned is not None:
            owned.release()
