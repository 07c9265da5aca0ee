"""Exceptions raised for a folder that another run owns."""


class OwnerError(RuntimeError):
    """Another run trains in the folder; the text says which one, since when, and what to do."""


class LeaseLostError(OwnerError):
    """Another run has taken the folder over while this one was paused for long."""
