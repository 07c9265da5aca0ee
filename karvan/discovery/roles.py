"""The kinds of processes of a job."""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["parameter-server", "embedding-worker", "loader", "trainer"]

SERVER: Final = "parameter-server"
WORKER: Final = "embedding-worker"
LOADER: Final = "loader"
TRAINER: Final = "trainer"

# Who is needed comes before who needs it; jobs stop the other way round.
START_ORDER: tuple[Role, ...] = (SERVER, WORKER, LOADER, TRAINER)
