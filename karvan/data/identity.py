"""`Identity`: distinguishes data sets, for example yesterday's from today's.

The id is a hash of the parts' names, their numbers of records, and the content: all of it up to 64 MiB,
or blocks at equal distances if it is larger (see `fingerprint.py`). So yesterday's `part-0.parquet` and
today's differ even if they have equally many records, and so does data before and after a correction. Names
of folders do not count, so that a data set may be moved, except for those of partitions, such as
`day=2026-01-31`.

Any data for `Trainer.fit` may have a method `identity()` that returns one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from karvan.data.fingerprint import text_hash
from karvan.data.source import Part, Source

_FILES_LISTED = 1024


@dataclass(frozen=True)
class Identity:
    """What distinguishes data sets, for checkpoints.

    Args:
        id: Equal for the same data, and different for other data.
        label: A description for people.
        name: The name that `fit`, or a `Window`, gives it.
        files: A hash of each file's path and number of records, to count the files that two data sets share;
            empty if there are very many.
        grows: Whether records are only added at the end, as in a Kafka topic, so that a fit continues at its
            position.

    Example:
        >>> kv.data.Identity.named("monday").label
        'monday'
    """

    id: str
    label: str
    name: str | None = None
    files: tuple[str, ...] = ()
    grows: bool = False

    def state(self) -> dict[str, Any]:
        """Return its fields for JSON.

        Returns:
            The fields by name.
        """
        return {**vars(self), "files": list(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Identity:
        """Make the identity that `state` returned.

        Args:
            state: The fields.

        Returns:
            The identity.
        """
        return cls(**{**state, "files": tuple(state["files"])})

    @classmethod
    def named(cls, name: str, files: tuple[str, ...] = ()) -> Identity:
        """Make the identity of data with a name: the name alone decides, whatever the content.

        Args:
            name: The name.
            files: Hashes of its files.

        Returns:
            The identity.
        """
        return cls(f"name {name}", name, name, files)


def identity_of(source: Source) -> Identity:
    """The identity of a source's records."""
    parts = source.parts()
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{_path_in_id(part.path)} {part.records}\n".encode())
    content: Callable[[], str] | None = getattr(source, "fingerprint", None)
    digest.update((content() if content else "\n".join(part.path for part in parts)).encode())
    return Identity(digest.hexdigest()[:16], _label(parts), files=files_of(source))


def files_of(source: Source) -> tuple[str, ...]:
    """Hash the name and length of every file, for `Identity.files`; no hashes for very many files."""
    parts = source.parts()
    return tuple(text_hash(f"{part.path} {part.records}") for part in parts if len(parts) <= _FILES_LISTED)


def _path_in_id(path: str) -> str:
    *folders, name = path.split("/")
    return "/".join([*(folder for folder in folders if "=" in folder), name])


def _label(parts: Sequence[Part]) -> str:
    if not parts:
        return "no files"
    records = sum(part.records for part in parts)
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"{parts[0].path}{more}, {records:,} records"
