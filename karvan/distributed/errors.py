"""What goes wrong between processes."""


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed; the message names it."""
