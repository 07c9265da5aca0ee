"""The owner of a checkpoint folder: a lease, so that two runs never write into one folder."""

from karvan.owner.ownership import Ownership, check_owner, own
from karvan.owner.record import LeaseLostError, OwnerError

__all__ = [
    "LeaseLostError",
    "OwnerError",
    "Ownership",
    "check_owner",
    "own",
]
