"""`persia.service`: addresses of services."""

from __future__ import annotations

import os

from karvan.job.environment import JobEnvironment


def get_embedding_worker_services() -> list[str]:
    """The addresses of embedding workers: those of EMBEDDING_WORKER_SERVICE, or those listed for the job."""
    named = os.environ.get("EMBEDDING_WORKER_SERVICE", "")
    if named:
        return [address.strip() for address in named.split(",") if address.strip()]
    listed = list(JobEnvironment.read().embedding_worker_addresses)
    if not listed:
        raise ValueError("Expected addresses in EMBEDDING_WORKER_SERVICE, such as 10.0.0.7:8887, got none.")
    return listed
