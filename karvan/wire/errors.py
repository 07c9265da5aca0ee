"""Exceptions raised by calls between processes."""


class WireError(ConnectionError):
    """A peer cannot be reached or does not answer in time; the message names it."""


class BusyError(WireError):
    """A service has no room for another caller at the moment; callers try again until their deadline."""


class PeerLostError(WireError):
    """A service has restarted and has lost what earlier calls gave it."""


class RefusedError(RuntimeError):
    """A service refuses a call: it is malformed, too large, not allowed, or of an older run of the job."""


class ListenError(OSError):
    """A service cannot listen at its port."""

    temporary = True
