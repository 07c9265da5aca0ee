"""`RankError`: failures of other ranks. `ChannelLeftError`: why no more collectives are possible."""


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed; the message names it."""


class ChannelLeftError(RankError):
    """This rank has left the channel, since a collective has failed here or elsewhere."""
