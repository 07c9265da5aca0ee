"""The master of a job: its registry and the ledger of its work, in one process and at one address.

The ledger is `master/work.db` in the folder of checkpoints. A master that is killed and started again, at the
same address, continues with it: members register again with their next heartbeat, and holders of tasks have
their leases as before. Two masters of one job exclude each other: the second is refused, because the folder
has an owner (`karvan.owner`), and because the file is locked.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from karvan.cluster.role_process import RoleSettings, stop_signals
from karvan.discovery.registry import Registry
from karvan.job.checkpoint_url import local_path
from karvan.owner import own
from karvan.work.ledger import LedgerError
from karvan.work.service import WorkService
from karvan.work.trainer_group import TrainerGroup

_log = logging.getLogger("karvan.cluster")

LEDGER = Path("master", "work.db")
_CHECK_EVERY = 1.0  # seconds between two checks for tasks that make no progress


def serve_master(settings: RoleSettings) -> None:
    """Serve until SIGTERM or SIGINT; an error that prevents the start is raised."""
    job = settings.job
    if not job.checkpoints:
        raise ValueError(
            "A master expects the folder of the job's checkpoints, which holds its ledger: set --checkpoints."
        )
    if job.registry or job.count > 1 or job.generation or job.advertise:
        raise ValueError(
            "A master is the registry of its job, and there is one: it expects no registry, index, count, "
            "generation or advertise."
        )
    path = local_path(job.checkpoints) / LEDGER
    with stop_signals() as ended, ExitStack() as stack:
        owner = own(path.parent)  # not of all checkpoints, which the trainers write
        stack.callback(owner.release)
        try:
            work = WorkService(path)
        except LedgerError as error:
            raise ValueError(str(error)) from None
        stack.callback(work.close)
        group = TrainerGroup(path.with_name("group.json"), settled=partial(release_all, work))
        work.refuse(group.gone)
        registry = Registry(settings.host, job.port, settings.security, beside=[work, group])
        stack.callback(registry.close)
        _log.info("master at %s, ledger in %s", registry.address, path)
        while not ended.wait(_CHECK_EVERY):
            owner.check()
            for lease in work.overdue(group.is_member):
                _log.warning(
                    "%s made no progress with %s, which others can lease now.", lease.holder, lease.task
                )
        _log.info("master ends")


def release_all(work: WorkService, processes: list[str]) -> None:
    """The trainers that are left have settled what these had done: others may lease the rest."""
    for process in processes:
        work.release_process(process)
