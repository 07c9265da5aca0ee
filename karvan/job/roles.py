"""`Role`: the kinds of processes of a job."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """A kind of process; the value is its name in messages, in KARVAN_ROLE and on the command line."""

    PARAMETER_SERVER = "parameter-server"
    EMBEDDING_WORKER = "embedding-worker"
    LOADER = "loader"
    TRAINER = "trainer"
    MASTER = "master"


# A role comes before the roles that need it; jobs stop in the reverse order.
START_ORDER = (Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER, Role.LOADER, Role.TRAINER)
