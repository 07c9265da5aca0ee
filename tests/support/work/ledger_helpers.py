"""What tests of ledgers share: small data, and steps of a holder."""

from collections import Counter

from karvan.work.ledger import NoTask
from karvan.work.task import TaskKind

PARTS = (("f1", 10), ("f2", 10))


def lease_of(ledger, holder="a", kinds=TaskKind):
    """One lease, or the answer why there is none."""
    got = ledger.lease(holder, kinds)
    return got if isinstance(got, NoTask) else got[0]


def finish(ledger, lease):
    assert ledger.acknowledge({lease.token: lease.task.records}) == []


def release(ledger, holder):
    """End all leases of a holder that has died or left; returns the tasks."""
    leases = ledger.leases_of(holder)
    ledger.give_back([lease.token for lease in leases])
    return [lease.task for lease in leases]


def every_record(epochs, parts=PARTS):
    return Counter((e, path, i) for e in range(epochs) for path, records in parts for i in range(records))
