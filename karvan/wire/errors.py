"""Exceptions raised by calls between processes."""


class WireError(ConnectionError):
    """A peer cannot be reached or does not answer in time; the message names it."""


class BusyError(WireError):
    """A peer has no room for another caller at the moment; callers try again until their deadline."""


class PeerLostError(WireError):
    """A peer has begun anew, without what it was told before."""


class RefusedError(RuntimeError):
    """A peer does not want a call: it is malformed, too large, not allowed, or of a job that has moved on."""


class ListenError(OSError):
    """A service cannot have the port it is to listen at."""

    temporary = True
