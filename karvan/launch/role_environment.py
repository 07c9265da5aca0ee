"""The environment variables through which a process learns about its job.

| Name | Value |
|---|---|
| KARVAN_JOB | the job's name |
| KARVAN_ROLE | trainer, parameter-server, embedding-worker or loader |
| KARVAN_INDEX, KARVAN_COUNT | which of its role's replicas this is, and how many there are |
| KARVAN_REGISTRY | host:port where roles find each other |
| KARVAN_GENERATION | 0 at first, one more after every rollback, as it was when this process started |
| KARVAN_MODE, KARVAN_STALENESS, KARVAN_WIRE | sync, hybrid or async; batches; float32, bfloat16 or float16 |
| KARVAN_LR_STALENESS, KARVAN_GRADS_TO_WAIT, KARVAN_TOLERANCE | `dense` of the job: 0 or 1, numbers |
| KARVAN_TRAINERS, KARVAN_SERVERS, KARVAN_WORKERS, KARVAN_LOADERS | replicas of each role |
| KARVAN_HOST, KARVAN_PORT | where to listen; port 0 is any free one |
| KARVAN_CHECKPOINTS | the folder of checkpoints, if there is one |
| KARVAN_OWNER | the id of the launcher's lease of that folder; its processes belong to it |
| KARVAN_DATA | `data` of the job as JSON, if it has any |
| KARVAN_THREADS | threads to use, if the role has a number; OMP_NUM_THREADS is the same then |
| KARVAN_TOKEN_FILE | the file with the token that services ask for |
| KARVAN_TLS_CERT, _KEY, _CA, _MUTUAL | files of TLS, if it is used; MUTUAL is 0 or 1 |
| KARVAN_SERVER_LOSS | reload: a server that is lost takes its rows as they were saved while others go on |

Trainers have what torch wants as well: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; not MASTER_ADDR and
MASTER_PORT, since they meet at the registry. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface of
KARVAN_HOST, unless it means all of them, or the job sets them itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from karvan.discovery.roles import LOADER, SERVER, TRAINER, WORKER, Role
from karvan.launch.network_interfaces import interface_settings

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec

NAMES = tuple(
    f"KARVAN_{name}"
    for name in (
        *("JOB", "ROLE", "INDEX", "COUNT", "REGISTRY", "GENERATION", "MODE", "STALENESS", "WIRE"),
        *("LR_STALENESS", "GRADS_TO_WAIT", "TOLERANCE"),
        *("TRAINERS", "SERVERS", "WORKERS", "LOADERS", "HOST", "PORT", "CHECKPOINTS", "DATA", "THREADS"),
        *("OWNER", "TOKEN_FILE", "TLS_CERT", "TLS_KEY", "TLS_CA", "TLS_MUTUAL", "SERVER_LOSS"),
    )
)
TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NOT_PASSED_ON = ("MASTER_ADDR", "MASTER_PORT")  # where the ranks of another job meet


def environment_of(
    spec: JobSpec,
    role: Role,
    index: int,
    *,
    registry: str,
    generation: int,
    owner: str = "",
) -> dict[str, str]:
    """The environment of one process; owner: the id of the launcher's lease."""
    section, dense = spec.of_role(role), spec.dense
    port = getattr(section, "port", 0)
    values: dict[str, object] = {
        "JOB": spec.name,
        "ROLE": role,
        "INDEX": index,
        "COUNT": section.replicas,
        "REGISTRY": registry,
        "GENERATION": generation,
        "MODE": spec.mode,
        "STALENESS": spec.staleness,
        "WIRE": spec.wire,
        "LR_STALENESS": None if dense is None else int(dense.lr_staleness),
        "GRADS_TO_WAIT": None if dense is None else dense.grads_to_wait,
        "TOLERANCE": None if dense is None else dense.tolerance,
        "TRAINERS": spec.of_role(TRAINER).replicas,
        "SERVERS": spec.of_role(SERVER).replicas,
        "WORKERS": spec.of_role(WORKER).replicas,
        "LOADERS": spec.of_role(LOADER).replicas,
        "HOST": spec.host,
        "PORT": port + index if port else 0,
        "CHECKPOINTS": spec.checkpoints,
        "OWNER": owner or None,
        "DATA": None if spec.data is None else json.dumps(spec.data, default=str),
        "THREADS": section.threads,
        "SERVER_LOSS": "reload" if spec.on_server_loss == "reload" else None,
    }
    made = {**_named(values), **security_of(spec)}
    if section.threads is not None:
        made["OMP_NUM_THREADS"] = str(section.threads)
    if role == TRAINER:
        numbers = (index, section.replicas, index, section.replicas)
        made |= {name: str(value) for name, value in zip(TORCH_NAMES, numbers, strict=True)}
        return {**interface_settings(spec.host), **section.env, **made}
    return {**section.env, **made}


def security_of(spec: JobSpec) -> dict[str, str]:
    """What all processes of a job know of its token and TLS; see `karvan.wire.Security`."""
    values: dict[str, object] = {"TOKEN_FILE": spec.token_file}
    if spec.tls is not None:
        values |= {
            "TLS_CERT": spec.tls.cert,
            "TLS_KEY": spec.tls.key,
            "TLS_CA": spec.tls.ca,
            "TLS_MUTUAL": int(spec.tls.mutual),
        }
    return _named(values)


def _named(values: dict[str, object]) -> dict[str, str]:
    return {f"KARVAN_{name}": str(value) for name, value in values.items() if value is not None}
