"""Errors of MaxCompute after which it is worth asking again."""

from karvan.data.errors import DataError


class DamagedAnswerError(DataError):
    """An answer with wrong checksums or too few records; it may be right when asked again."""


class EndedSessionError(DataError):
    """The download session does not exist any more; another one can be opened."""
