"""One owner of a run: the lease of a checkpoint folder, so that two trainings never write into one."""

from karvan.owner.errors import LeaseLostError, OwnerError
from karvan.owner.ownership import OWNER_VARIABLE, SECONDS_VARIABLE, Ownership, check_owner, own

__all__ = [
    "OWNER_VARIABLE",
    "SECONDS_VARIABLE",
    "LeaseLostError",
    "OwnerError",
    "Ownership",
    "check_owner",
    "own",
]
