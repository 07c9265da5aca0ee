"""Errors of checkpoints."""

from __future__ import annotations

from os import PathLike

from karvan.job.checkpoint_url import shown


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, or a folder that is not one.

    Args:
        path: The checkpoint.
        problem: What is wrong.
        temporary: Whether the disk or the store failed, so that the same save may succeed later.
    """

    def __init__(self, path: str | PathLike[str], problem: str, *, temporary: bool = False) -> None:
        super().__init__(f"{shown(path)}: {problem}")
        self.path = shown(path)
        self.problem = problem
        self.temporary = temporary

    @classmethod
    def mismatch(cls, path: str | PathLike[str], expected: object, received: object) -> CheckpointError:
        """Make an error with the text "expected …, got …".

        Args:
            path: The checkpoint.
            expected: What was expected.
            received: What is there.

        Returns:
            The error.
        """
        return cls(path, f"expected {expected}, got {received}.")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not as it was written: files are missing or changed.

    They may also be those of a checkpoint it builds on. An older checkpoint may be intact. A checkpoint that
    does not fit the model, or that the system does not let us read, is a plain CheckpointError, because an
    older one would not help.

    Args:
        path: The checkpoint.
        problem: What is wrong.
        temporary: Whether it could not be read because of an outage.
    """
