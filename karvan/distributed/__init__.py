"""The processes that train one model together, and their collectives.

    distributed.current()               the connection of this process; a single rank unless it has connected
    distributed.current().main.sum(x)   a collective: every rank calls it, in the same order

A `CollectiveChannel` belongs to one thread of each rank, so that threads never mix up their messages.
"""

from karvan.argument_checks import publish
from karvan.distributed.collectives import CollectiveChannel, RankError
from karvan.distributed.connection import Connection, connect, current, disconnect

__all__ = ["CollectiveChannel", "Connection", "RankError", "connect", "current", "disconnect"]

publish("karvan.distributed")
