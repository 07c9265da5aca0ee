"""`persia.service`: addresses of services."""

from __future__ import annotations

import os

from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role

_DEFAULT = "embedding_worker:8887"  # of the services of PERSIA's docker compose


def get_embedding_worker_services() -> list[str]:
    """The addresses of embedding workers: of EMBEDDING_WORKER_SERVICE, of the job, or PERSIA's default."""
    named = os.environ.get("EMBEDDING_WORKER_SERVICE", "")
    if named:
        return [address.strip() for address in named.split(",") if address.strip()]
    return list(JobEnvironment.read().addresses.get(Role.EMBEDDING_WORKER, ())) or [_DEFAULT]
