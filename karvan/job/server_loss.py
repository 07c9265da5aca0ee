"""`ServerLoss`: what a job does when a parameter server crashes."""

from __future__ import annotations

from enum import StrEnum


class ServerLoss(StrEnum):
    """What happens when a parameter server has restarted without the rows that it had.

    ROLLBACK: trainers fail, and a launched job restarts them from the last checkpoint. RELOAD: the server
    loads its rows from the last checkpoint while the others continue; lost updates are counted.
    """

    ROLLBACK = "rollback"
    RELOAD = "reload"
