"""`connect`: where a program's rows are stored: in this process, sharded over ranks, or on servers."""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from karvan.argument_checks import meant
from karvan.distributed.collectives import (
    CollectiveChannel,
    GlooChannel,
    RankError,
    RankMonitor,
    SharedMemoryChannel,
    agree_on_name,
    closing_ports,
    join_boards,
    keep_forever,
)
from karvan.job.environment import (
    SYNC,
    DenseSettings,
    JobEnvironment,
    ServerLoss,
    SyncMode,
    choose_dense,
    choose_mode,
)
from karvan.job.roles import Role
from karvan.native import require
from karvan.system_limits import require_limits
from karvan.torch_internals import PrefixStore, Store, default_group, default_store

if TYPE_CHECKING:
    from karvan.discovery.directory import Membership
    from karvan.distributed.elastic import ElasticGroup
    from karvan.distributed.embedding_workers import Workers
    from karvan.distributed.parameter_servers import Servers
    from karvan.distributed.wire_store import WireStore


IN_PROCESS = ("memory", "cuda")
KINDS = (*IN_PROCESS, "sharded", "remote")
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHOICES = {
    "wire": tuple(WIRES),
    "grad_reduce": ("mean", "key", "sum"),
    "transport": ("auto", "memory", "network"),
    "device": ("cpu", "cuda"),
}


@dataclass(frozen=True)
class ConnectionSettings:
    """The settings of a connection; see `connect`.

    elastic: trainers of the run come and go. They are members, whose numbers and run the job's master gives
    out; servers stage their updates until their step is committed (`parameter_servers.py`).

    """

    kind: str = "memory"
    wire: str = "float32"
    grad_reduce: str = "mean"
    timeout: float = 300.0
    transport: str = "auto"
    device: str = "cpu"
    device_memory: int | None = None  # bytes that rows take on the GPU at most
    capacity: int | None = None  # rows of this process, over all tables
    staleness: int = 1
    on_server_loss: ServerLoss = ServerLoss.ROLLBACK
    mode: SyncMode = SYNC
    dense: DenseSettings = field(default_factory=DenseSettings)
    elastic: bool = False
    member: int = 0
    run: str = ""

    def __post_init__(self) -> None:
        kind = self.kind
        if kind not in KINDS:
            raise ValueError(f"connect expects one of {', '.join(KINDS)}, got {kind!r}.{meant(kind, KINDS)}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        if self.device == "cuda" and kind != "sharded":
            raise ValueError(
                f'device="cuda" is for connect("sharded"), got connect("{kind}"): use connect("cuda") for '
                "rows on the GPU of one process, or Table(device=…) for some tables."
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}.")
        if self.device_memory is not None and kind != "cuda" and self.device != "cuda":
            raise ValueError(
                'device_memory is for connect("cuda") and connect("sharded", device="cuda"), got '
                f'connect("{kind}").'
            )
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"connect expects a capacity of at least 1 row, got {self.capacity}.")
        if self.capacity is not None and (kind not in ("memory", "sharded") or self.device == "cuda"):
            raise ValueError(
                'capacity is for connect("memory") and connect("sharded") with rows in memory, got '
                f'connect("{kind}"): use device_memory for a GPU, roles.parameter_servers.capacity for '
                "servers."
            )

    def check_elastic(self) -> None:
        """Raise a ValueError if an elastic run cannot have these settings."""
        if not self.run:
            raise ValueError("An elastic run has a name that its members share, got none.")
        if self.on_server_loss is ServerLoss.RELOAD:
            raise ValueError(
                "An elastic run goes back to its checkpoint when a server is lost: expected on_server_loss "
                "rollback, got reload."
            )
        if self.dense.rejects:
            raise ValueError(
                "An elastic run has neither grads_to_wait nor tolerance, because gradients that wait for "
                "others are lost when their trainer dies."
            )


_UNITS = {"": 1, "B": 1} | {
    unit + suffix: base ** (power + 1)
    for power, unit in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def missing_cuda() -> str:
    """Why torch finds no GPU, for a message."""
    if torch.version.cuda is None:
        return f"torch.version.cuda is None here (torch {torch.__version__})"
    return (
        "torch.cuda.is_available() is False here "
        f"(torch {torch.__version__} for CUDA {torch.version.cuda}; nvidia-smi and karvan doctor say more)"
    )


def require_gpu(wanted: str) -> None:
    """Raise unless there are a GPU and triton; wanted: what needs them, as the program wrote it."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"{wanted} expects a GPU and a torch that is built with CUDA, but {missing_cuda()}. Rows can be "
            'in the memory of the machine instead: kv.connect("memory"), and no Table(device="cuda").'
        )
    if find_spec("triton") is None:
        raise ValueError(
            f'{wanted} needs triton, which is not installed: pip install "triton>=3.6" (torch for CUDA '
            "comes with it)."
        )


def memory_size(requested: str | int) -> int:
    """The bytes of a size such as "20GB", "1.5GiB" or 512_000_000; raises ValueError for anything else."""
    size = 0.0
    if isinstance(requested, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", requested.strip())
        if match is not None and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    elif isinstance(requested, int) and not isinstance(requested, bool):
        size = requested
    if not size >= 1:
        raise ValueError(
            'device_memory expects a size above 0, such as "20GB", "512MiB" or a number of bytes, got '
            f"{requested!r}."
        )
    return int(size)


_log = logging.getLogger("karvan.distributed")

# One for each thread with collectives: the program's own, those that feed training and evaluation, and saves.
_CHANNELS = ("main", "fit", "evaluate", "save")


class Connection:
    """This process among those that train together: `rank` of `world_size`, and a channel for each thread."""

    def __init__(self, settings: ConnectionSettings | None = None) -> None:
        self.settings = settings or ConnectionSettings()
        self.channels = {name: CollectiveChannel(name) for name in _CHANNELS}
        self.rank = 0
        self.world_size = 1
        self.chosen = False  # whether the program has called `connect`
        self.servers: Servers | None = None
        self.join_save: Callable[[], object] = lambda: None  # waits for a save that needs its channel
        self.workers: Workers | None = None
        self._member: Membership | None = None
        self.group: ElasticGroup | None = None  # of trainers that come and go; this one then seems alone

    @property
    def main(self) -> CollectiveChannel:
        """The channel of the thread that computes."""
        return self.channels["main"]

    @property
    def trainers(self) -> CollectiveChannel:
        """The channel of all trainers, also of those that come and go."""
        return self.main if self.group is None else self.group.channel

    @property
    def here(self) -> CollectiveChannel:
        """The channel of the calling thread."""
        return self.channels[getattr(_thread, "channel", "main")]

    @contextmanager
    def on(self, channel: str) -> Iterator[CollectiveChannel]:
        """Within it, the calling thread uses this channel, which no other thread may use meanwhile."""
        before = getattr(_thread, "channel", "main")
        _thread.channel = channel
        try:
            yield self.channels[channel]
        finally:
            _thread.channel = before

    @property
    def ahead(self) -> int:
        """How many batches are looked up in advance."""
        return self.settings.staleness if self.servers is not None else 0

    @property
    def divisor(self) -> int:
        """The divisor of rows' gradients: how many trainers' gradients make a step.

        1 in an elastic run, where commits have a factor.
        """
        if self.settings.grad_reduce != "mean" or self.settings.elastic:
            return 1
        return self.settings.mode.gradients_per_step(self.world_size, self.settings.dense)

    @property
    def joint_steps(self) -> bool:
        """Whether every step has the gradients of all trainers; always true for a single trainer."""
        return self.world_size == 1 or self.settings.mode.joint_steps

    def reach(self, servers: Sequence[str] | None, workers: Sequence[str] | None = None) -> None:
        """Find servers and workers at these addresses, or as the environment says; a collective."""
        from karvan.discovery.directory import member_from_environment
        from karvan.distributed.embedding_workers import find_workers
        from karvan.distributed.parameter_servers import (
            find_servers,  # imports Flight, for which other connections need not wait
        )

        hello = {
            **self._identity(),
            "mode": self.settings.mode.name,
            "staleness": self.settings.staleness,
            "grad_reduce": self.settings.grad_reduce,
            "divisor": self.divisor,
            "dense": asdict(self.settings.dense),
        }
        reload = self.settings.on_server_loss is ServerLoss.RELOAD
        self.servers = find_servers(servers, hello, self.settings.timeout, reload)
        self.workers = find_workers(workers, self.servers.hello, self.settings.timeout)
        self._member = member_from_environment(Role.TRAINER)

    def rejoin(self, run: str) -> None:
        """Become a member of another elastic run, before anything was looked up: the last one is over."""
        if self.servers is not None and self.servers.hello["run"] != run:
            self.servers.rejoin(run)
            if self.workers is not None:
                self.workers.rejoin(run)

    def abandon(self, members: Iterable[int]) -> None:
        """Members of an elastic run are gone: embedding workers forget them."""
        if self.workers is not None:
            self.workers.abandon(members)

    def _identity(self) -> dict[str, Any]:
        """Who this trainer is, of which run; a collective, unless the run is elastic."""
        settings = self.settings
        if settings.elastic:
            settings.check_elastic()
            return {"elastic": True, "trainer": settings.member, "trainers": 0, "run": settings.run}
        run = self.main.gather_json(secrets.token_hex(8))[0]
        return {"trainer": self.rank, "trainers": self.world_size, "run": run}

    def fail(self, channel: str, error: BaseException) -> None:
        """This rank cannot continue: leave a channel, on which others may wait, and report why."""

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The exception to raise for an error of torch's collectives: a RankError if a rank is the cause."""
        return error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """An error of torch's collectives names the rank that is missing."""
        try:
            yield
        except RuntimeError as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error

    def close(self) -> None:
        """Disconnect, once a running save has ended; the process group stays."""
        self.join_save()
        if self.workers is not None:
            self.workers.close()
        if self.servers is not None:
            self.servers.close()
        if self.group is not None:
            self.group.close()
        if self._member is not None:
            self._member.leave()


class SharedConnection(Connection):
    """A connection over torch's process group."""

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        timeout = timedelta(seconds=settings.timeout)
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise RuntimeError(
                    'connect("sharded") expects a process that torchrun has started, or an initialised '
                    "process group, got neither: torchrun --nproc-per-node=2 train.py"
                )
            backend = "gloo"
            if torch.cuda.is_available():
                backend = "cpu:gloo,cuda:nccl"
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            store, rank, world = _open_store(timeout)
            name = agree_on_name(store, rank, world, settings.timeout)
            with closing_ports():
                dist.init_process_group(
                    backend, store=PrefixStore(name, store), rank=rank, world_size=world, timeout=timeout
                )
            _owned.add("process group")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        store = default_store()
        number = store.add("karvan/connections", 1) - 1  # each rank adds one for every connection of the job
        self._monitor = RankMonitor(
            PrefixStore(f"karvan/{number // self.world_size}", store),
            self.rank,
            self.world_size,
            self._progress,
        )
        with closing_ports():
            self._make_channels(timeout)
        atexit.register(self._monitor.close)

    def _make_channels(self, timeout: timedelta) -> None:
        settings = self.settings
        first = GlooChannel("first", dist.new_group(backend="gloo", timeout=timeout), self._explain)
        boards = None
        if settings.transport != "network":
            boards = join_boards(
                _CHANNELS, self.rank, self.world_size, lambda what, value: first.gather_json(value)
            )
        for name in _CHANNELS:
            if boards is not None:
                self.channels[name] = SharedMemoryChannel(
                    name, boards[name], self.rank, self.world_size, settings.timeout, self._explain
                )
            else:
                group = dist.new_group(backend="gloo", timeout=timeout)
                self.channels[name] = GlooChannel(name, group, self._explain)
        if settings.transport == "memory" and boards is None:
            raise RuntimeError(
                "transport 'memory' expects ranks on one machine that see each other's memory, with Karvan's "
                "native core."
            )

    @override
    def close(self) -> None:
        super().close()
        self._monitor.close()
        atexit.unregister(self._monitor.close)

    @override
    def fail(self, channel: str, error: BaseException) -> None:
        self._monitor.report_failure(error)
        self.channels[channel].leave()
        if dist.is_initialized():
            keep_forever(default_group())  # gradients may be in flight

    @override
    def explained(self, error: RuntimeError) -> RuntimeError:
        of_torch = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        if of_torch and not isinstance(error, RankError):
            return self._monitor.explain("main", None, error)
        return error

    def _explain(self, channel: CollectiveChannel, lost: int | None, error: Exception) -> Exception:
        return self._monitor.explain(channel.name, lost, error)

    def _progress(self) -> dict[str, int]:
        return {name: channel.operations for name, channel in self.channels.items()}


_thread = threading.local()
_owned: set[str] = set()  # what `connect` has created, and `disconnect` destroys
_store: WireStore | None = None  # for the rendezvous of a launched job's trainers
_current = Connection()
_lock = threading.Lock()


def current() -> Connection:
    """The connection of this process."""
    return _current


def connect(
    kind: str = "memory",
    *,
    wire: str | None = None,
    grad_reduce: str = "mean",
    timeout: float = 300.0,
    transport: str = "auto",
    device: str = "cpu",
    device_memory: str | int | None = None,
    capacity: int | None = None,
    servers: Sequence[str] | None = None,
    workers: Sequence[str] | None = None,
    mode: str | None = None,
    staleness: int | None = None,
    lr_staleness: bool | None = None,
    grads_to_wait: int | None = None,
    tolerance: int | None = None,
    pull_every: int | None = None,
    on_server_loss: str | None = None,
) -> Connection:
    """Choose where rows are stored, for engines that are created from now on.

    | kind | where rows are | who trains |
    |---|---|---|
    | "memory" | in this process | this process |
    | "cuda" | in the memory of its GPU | this process |
    | "sharded" | in all ranks, by key | the ranks that torchrun has started, each on a share of the data |
    | "remote" | on parameter servers | this process, or the trainers of torchrun or of a launched job |

    Args:
        kind: "memory", "cuda", "sharded" or "remote".
        wire: The dtype in which vectors and gradients are sent: "float32", "bfloat16" or "float16". By
            default as the launched job says, else float32.
        grad_reduce: What divides the sum of a key's gradients: "mean", the number of ranks; "key", the number
            of ranks that had the key in their batch; "sum", nothing.
        timeout: After how many seconds a rank that does not answer is an error on all others.
        transport: How ranks send rows: "memory" that they share, on one machine; "network"; or "auto", which
            takes memory if possible.
        device: Where a rank of "sharded" has its rows: "cpu", or "cuda" for its current GPU.
        device_memory: The most GPU memory that the rows of a rank take, such as "20GB" or a number of bytes.
            Further rows are in the memory of the machine; rows that are used often come to the GPU. Without
            it all rows are on the GPU.
        capacity: The most rows that this process has, over all tables of "memory" and "sharded". The least
            recently used rows are evicted.
        servers: Addresses of parameter servers, "host:port". A launched job finds its own.
        workers: Addresses of embedding workers, which hold the ids of batches that loaders send.
        mode: How trainers of "remote" synchronise: "sync" (lookups wait for all gradients of the step
            before), "hybrid" (rows may be some batches stale) or "async" (dense parameters are on the
            servers, too). By default as the launched job says, else by `staleness`: sync for 1, hybrid above.
        staleness: How many batches of a trainer may be between lookup and applied gradient. By default as the
            launched job says; else 1, or 4 with hybrid or async.
        lr_staleness: Mode async: whether the learning rate of a gradient is divided by its staleness.
        grads_to_wait: Mode async: how many gradients make a step, by their mean.
        tolerance: Mode async: how many versions behind a gradient may be. Others are rejected, and computed
            again.
        pull_every: Mode async: how many steps a trainer makes between two pulls of the dense parameters.
        on_server_loss: What happens when a server has restarted: "rollback", the default, is an error after
            which a launched job continues from its last checkpoint. "reload" loads the server's rows from the
            last checkpoint, and counts lost updates.

    Returns:
        The connection: `rank`, `world_size`, and how to reach the others.

    Raises:
        ValueError: An argument is out of range, or is for another kind.
        RuntimeError: torchrun has not started the process, for "sharded".

    Example:
        >>> connection = kv.connect("memory", capacity=1_000_000)
        >>> connection.rank, connection.world_size
        (0, 1)
        >>> kv.disconnect()
    """
    global _current
    if wire is None:
        wire = (JobEnvironment.read().wire or "float32") if kind == "remote" else "float32"
    most = None if device_memory is None else memory_size(device_memory)
    settings = ConnectionSettings(kind, wire, grad_reduce, timeout, transport, device, most, capacity)
    if device == "cuda":
        require_gpu('kv.connect("sharded", device="cuda")')
    dense = (lr_staleness, grads_to_wait, tolerance, pull_every)
    remote = (servers, workers, mode, staleness, on_server_loss, *dense)
    if kind != "remote" and any(value is not None for value in remote):
        raise ValueError(
            "servers, workers, mode, staleness, on_server_loss and the options of mode async are for "
            f'connect("remote"), got "{kind}".'
        )
    if kind in IN_PROCESS and settings != ConnectionSettings(kind, device_memory=most, capacity=capacity):
        raise ValueError(
            f'wire, grad_reduce, timeout and transport are for connect("sharded"), got "{kind}".'
        )
    if kind == "cuda":
        require_gpu('kv.connect("cuda")')
    if kind == "remote":
        require()  # before a connection is closed, and addresses are asked for
        chosen, staleness = choose_mode(mode, staleness)
        if on_server_loss is None:
            on_server_loss = JobEnvironment.read().on_server_loss or ServerLoss.ROLLBACK
        if on_server_loss not in tuple(ServerLoss):
            raise ValueError(
                f"on_server_loss must be one of {', '.join(ServerLoss)}, got {on_server_loss!r}."
            )
        settings = replace(
            settings,
            mode=chosen,
            staleness=staleness,
            dense=choose_dense(chosen, *dense),
            on_server_loss=ServerLoss(on_server_loss),
        )
        chosen.check_server_loss(settings.on_server_loss)
    with _lock:
        _current.close()
        _current = Connection(settings if kind in IN_PROCESS else None)
        _current.chosen = True
        if kind not in IN_PROCESS:
            _current = _reach_others(settings, servers, workers)
        return _current


def _reach_others(
    settings: ConnectionSettings, servers: Sequence[str] | None, workers: Sequence[str] | None
) -> Connection:
    """A connection to other processes: to ranks, to trainers that come and go, or to servers alone."""
    job = JobEnvironment.read()
    if job.registry and job.role == Role.TRAINER and job.sharding == "dynamic":
        group = _open_group(settings, job)
        run = group.client.enter()
        connection = Connection(replace(settings, elastic=True, member=group.member, run=run))
        connection.group = group
    else:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        require_limits(world)
        by_torch = dist.is_initialized() or (world > 1 and "RANK" in os.environ)
        connection = (SharedConnection if settings.kind == "sharded" or by_torch else Connection)(settings)
    if settings.kind == "remote":
        connection.reach(servers, workers)
    connection.chosen = True
    return connection


def disconnect() -> None:
    """Store rows in this process again, for engines that are created from now on.

    It undoes `connect`, and waits for a running save.

    Example:
        >>> kv.disconnect()
    """
    global _store
    connect("memory")
    if _owned and dist.is_initialized():
        dist.destroy_process_group()
    _owned.clear()
    if _store is not None:
        _store.close()
        _store = None


def _open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store for the rendezvous of the ranks, this rank, and the number of ranks."""
    global _store
    job = JobEnvironment.read()
    if job.registry and job.role == Role.TRAINER:
        from karvan.distributed.wire_store import launched_store

        _store = launched_store(timeout.total_seconds())
        return _store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    return store, rank, world


def _open_group(settings: ConnectionSettings, job: JobEnvironment) -> ElasticGroup:
    from karvan.distributed.elastic import ElasticGroup, GroupClient
    from karvan.distributed.wire_store import launched_store
    from karvan.wire import Security
    from karvan.work.task import holder_of

    process = holder_of(Role.TRAINER, job.index, job.process or secrets.token_hex(8))
    client = GroupClient(job.master, process, Security.from_environment())
    store = launched_store(settings.timeout)
    group = ElasticGroup(client, store, transport=settings.transport, timeout=settings.timeout)
    atexit.register(group.close)
    return group
