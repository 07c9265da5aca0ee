"""`persia-k8s-utils`: PERSIA's commands for Kubernetes, each with what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from karvan.exit_codes import OK, USAGE

_INSTEAD = {
    "gencrd": "writes the resource definition of a PersiaJob",
    "operator": "runs PersiaJobs on a cluster",
    "server": "schedules PersiaJobs over HTTP",
}
_TEXT = (
    "Karvan has no operator for Kubernetes: start the roles of a PersiaJob as pods by persia-launcher, with "
    "PERSIA_NATS_URL at a pod that runs `karvan role master`, or have a Ray cluster run them: karvan launch "
    "job.yaml --engine ray. See docs/migrating.md."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print("usage: persia-k8s-utils {gencrd,operator,server}\n")
        for name, what in _INSTEAD.items():
            print(f"  {name:9} {what}: not supported")
        print(f"\n{_TEXT}")
        return OK
    if words[0] not in _INSTEAD:
        print(f"error: Expected one of {', '.join(_INSTEAD)}, got '{words[0]}'.", file=sys.stderr)
        return USAGE
    print(f"error: persia-k8s-utils {words[0]} is not supported. {_TEXT}", file=sys.stderr)
    return USAGE
