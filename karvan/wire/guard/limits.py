"""`Limits`: how many resources of a service its callers may use, in total and per host.

A caller's connection has two threads at a service. The numbers are far above what a job needs (a host with
sixty-four trainers and four connections of each has 256) and far below what overloads a machine. At a limit
no caller is refused permanently: the connection that was idle for longest is ended first, and its caller
reconnects by itself at its next call; if none is idle, the new caller gets a `BusyError`, and tries again
until its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a `Server` allows. Times are seconds."""

    connections: int = 2048  # of all callers
    connections_per_host: int = 1024
    streams_per_connection: int = 8  # Karvan's callers have two
    waiting_streams: int = 1024  # that were opened and have not sent their first message
    hello_within: float = 10.0  # a connection without a hello, or without its second stream, is ended
    hello_within_pressed: float = 2.0  # the same when there are many such connections
    pressure: int = 256  # so many are "many"
    first_call_within: float = 180.0  # a first call may be large and the network slow
    least_idle: float = 5.0  # a connection that was used within this time is not ended to make room
    sessions: int = 65536
    sessions_per_host: int = 32768
