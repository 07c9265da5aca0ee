"""One owner of a run: the lease of a checkpoint folder, so that two trainings never write into one."""

from karvan.owner.errors import LeaseLostError, OwnerError
from karvan.owner.ownership import Ownership, check_owner, own

__all__ = [
    "LeaseLostError",
    "OwnerError",
    "Ownership",
    "check_owner",
    "own",
]
