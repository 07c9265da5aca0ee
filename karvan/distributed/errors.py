"""`RankError`: failures of other ranks."""


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed; the message names it."""
