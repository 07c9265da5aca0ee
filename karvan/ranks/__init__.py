"""The processes that train one model together, and what they tell each other.

    ranks.current()               this process among them; alone unless it has connected
    ranks.current().main.sum(x)   a collective: every rank calls it, in the same order

Collectives go by lanes: a `Lane` belongs to one thread of each rank, so that threads never mix up each
other's messages.
"""

from karvan.ranks.connection import Connection, connect, current, disconnect
from karvan.ranks.errors import RankError
from karvan.ranks.lane import Lane

__all__ = ["Connection", "Lane", "RankError", "connect", "current", "disconnect"]
