"""The processes that train one model together, and what they tell each other.

    ranks.current()               this process among them; alone unless it has connected
    ranks.current().main.sum(x)   a collective: every rank calls it, in the same order

Collectives go by channels: a `CollectiveChannel` belongs to one thread of each rank, so that threads never
mix up each other's messages.
"""

from karvan.distributed.collectives import CollectiveChannel
from karvan.distributed.connection import Connection, connect, current, disconnect
from karvan.distributed.errors import RankError

__all__ = ["CollectiveChannel", "Connection", "RankError", "connect", "current", "disconnect"]
