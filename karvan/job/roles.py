"""`Role`: the kinds of processes of a job, and the table of all that distinguishes them.

Other modules ask a role for what they need to know, such as `role.listens`. So a role is added by a record
here, and by the function that makes its service. A program that has a role of its own adds its record
with `add_role`, before it imports anything else of Karvan, in each process of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from typing_extensions import override


@dataclass(frozen=True, eq=False, repr=False)
class Role(str):
    """A kind of process. As a text it is its name in messages, in KARVAN_ROLE and on the command line.

    A launched job has a section `names`, such as `loaders`, for each role that has a `start`.

    Attributes:
        start: Roles with a smaller number start first, and stop last. The launcher starts a role without one.
        factory: "module:function", which makes the service of the role from its `RoleSettings`.
        program: The key of a job.yaml that names the program of the role, if that is the user's.
        runs_user_code: Whether user code may take any time between two steps.
        listens: Whether others call its processes, so that these have addresses.
        connects: Whether each of its processes surely registers, which a program of the user may not do.
        patience: How many times longer than others it may send no heartbeat: user code may hold the
            interpreter for a while.
        is_rank: Whether its processes are torch's ranks, with devices of their own.
        holds_rows: Whether it has rows of tables.
        holds_tasks: Whether records are leased to it.
        finishes: Whether exit code 0 means that its work is done. Other roles are restarted.
        restarts_alone: Whether the others continue when one of its processes dies. Otherwise the job rolls
            back to a checkpoint, unless it is told to continue.
        saves: Whether it saves a checkpoint when the job stops.
        spreads: Whether its processes are on different nodes of a cluster if possible.
        beside: The role on whose nodes its processes are if possible.
    """

    name: str
    _: KW_ONLY
    start: int | None = None
    factory: str = ""
    program: str = ""
    runs_user_code: bool = False
    listens: bool = True
    connects: bool = True
    patience: float = 1.0
    is_rank: bool = False
    holds_rows: bool = False
    holds_tasks: bool = False
    finishes: bool = False
    restarts_alone: bool = True
    saves: bool = False
    spreads: bool = False
    beside: str = ""

    PARAMETER_SERVER: ClassVar[Role]
    EMBEDDING_WORKER: ClassVar[Role]
    LOADER: ClassVar[Role]
    TRAINER: ClassVar[Role]
    MASTER: ClassVar[Role]

    @override
    def __new__(cls, name: str, **record: object) -> Role:
        return super().__new__(cls, name)

    @override
    def __reduce__(self) -> tuple[Callable[[str], Role], tuple[str]]:
        return role_of, (self.name,)

    @property
    def identifier(self) -> str:
        """Its name in variables and keys, such as "parameter_server"."""
        return self.name.replace("-", "_")

    @property
    def section(self) -> str:
        """Its key in the `roles` of a job.yaml, such as "parameter_servers"."""
        return f"{self.identifier}s"


_table: dict[str, Role] = {}


def add_role(role: Role) -> Role:
    """Add a role to the table, or replace the one of this name."""
    _table[role.name] = role
    return role


def role_of(name: str) -> Role:
    """The role of a name; a ValueError lists the names."""
    if name not in _table:
        raise ValueError(f"Expected a role of {', '.join(_table)}, got {name!r}.")
    return _table[name]


def all_roles() -> tuple[Role, ...]:
    """All roles of the table."""
    return tuple(_table.values())


def start_order() -> tuple[Role, ...]:
    """The roles of a job, each before the roles that need it; jobs stop in the reverse order."""
    starts = {role: role.start for role in all_roles() if role.start is not None}
    return tuple(sorted(starts, key=starts.__getitem__))


Role.PARAMETER_SERVER = add_role(
    Role(
        "parameter-server",
        start=0,
        factory="karvan.cluster.parameter_server.service:make",
        holds_rows=True,
        restarts_alone=False,
        spreads=True,
    )
)
Role.EMBEDDING_WORKER = add_role(
    Role(
        "embedding-worker",
        start=10,
        factory="karvan.cluster.embedding_worker.service:make",
        spreads=True,
    )
)
Role.LOADER = add_role(
    Role(
        "loader",
        start=20,
        factory="karvan.cluster.loader.context:make",
        program="loader_entry",
        runs_user_code=True,
        holds_tasks=True,
        finishes=True,
    )
)
Role.TRAINER = add_role(
    Role(
        "trainer",
        start=30,
        program="entry",
        runs_user_code=True,
        listens=False,
        connects=False,
        patience=6.0,
        is_rank=True,
        holds_tasks=True,
        finishes=True,
        restarts_alone=False,
        saves=True,
        beside="loader",
    )
)
Role.MASTER = add_role(Role("master"))
