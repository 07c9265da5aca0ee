"""`PSClient`: dense parameters and embedding vectors on parameter servers, for loops written by hand.

    client = PSClient(["127.0.0.1:7000"], worker_id=0, num_workers=2)
    client.push_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        client.pull_dense_parameters(into=model)
        loss(model, batch).backward()
        client.push_gradients([parameter.grad for parameter in model.parameters()])

Servers are those of `karvan role parameter-server`. All workers of a job name the same servers in the same
order, and the same settings; each has a number of its own. A worker that is started again under its number
continues. **A push that was rejected**, because it is stale, changed nothing, neither dense parameters nor
rows: pull, compute, and push again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from karvan.argument_checks import listed
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.layers import initialiser_of
from karvan.compat.unsupported import UnsupportedError
from karvan.dense.optimizer_spec import describe
from karvan.dense.remote import DenseServerProxy, owner_of_parameter, split_state
from karvan.distributed.connection import Connection
from karvan.distributed.settings import ConnectionSettings
from karvan.embedding import EmbeddingEngine, Table, init
from karvan.embedding.optim.base import SparseOptimizer
from karvan.job.environment import ASYNC, DenseSettings
from karvan.ragged import Batch
from karvan.store import LookupContext


class PulledModel(NamedTuple):
    """Dense parameters: the largest version of the servers, and arrays by name."""

    version: int
    parameters: dict[str, NDArray[Any]]


class PushResult(NamedTuple):
    """Whether gradients were accepted, and the servers' largest version after that."""

    accepted: bool
    version: int


class NamedGradient(NamedTuple):
    """A gradient of the parameter of a name or, with indices, of embedding vectors of a table."""

    name: str
    values: Any
    indices: Any = None


@dataclass(frozen=True)
class EmbeddingTableInfo:
    """A table of embedding vectors; its rows are initialised when they are first pulled.

    initializer: one of kv.init, or a name, as "uniform", from -0.05 to 0.05.
    """

    name: str
    dim: int
    initializer: init.Initialiser | str = "uniform"


class PSClient:
    """A worker's client of parameter servers.

    worker_id, num_workers: which worker this is, from 0, and how many there are at most. grads_to_wait: how
    many gradients make a step with their mean; then gradients that are more than `tolerance` versions behind
    are rejected. Without it every push is a step, with lr_staleness_modulation at a learning rate that is
    divided by max(1, staleness). run: the name of the job.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        worker_id: int = 0,
        num_workers: int = 1,
        grads_to_wait: int | None = None,
        tolerance: int | None = None,
        lr_staleness_modulation: bool = False,
        run: str = "elasticdl",
        timeout: float = 300.0,
    ) -> None:
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise ContractError(
                "PSClient expects a list of addresses, or what build_channel(address) of "
                f"elasticai_api.util.grpc_utils gives for each, got {addresses!r}."
            )
        if not 0 <= worker_id < num_workers:
            raise ContractError(
                f"PSClient expects worker_id from 0 to num_workers - 1, got {worker_id} of {num_workers}."
            )
        from karvan.distributed.parameter_servers import find_servers  # imports Arrow Flight

        dense = DenseSettings(lr_staleness_modulation, grads_to_wait, tolerance)
        hello = {
            "trainer": worker_id,
            "trainers": num_workers,
            "run": run,
            "mode": ASYNC.name,
            "staleness": 1,
            "grad_reduce": "sum",
            "divisor": 1,
            "dense": asdict(dense),
        }
        self._worker = f"worker-{worker_id}"
        settings = ConnectionSettings("remote", grad_reduce="sum", timeout=timeout, mode=ASYNC)
        self._connection = Connection(settings)
        servers = self._connection.servers = find_servers(list(addresses), hello, timeout)
        model = servers.new_model()
        self._servers = [DenseServerProxy(servers, number, model) for number in range(len(servers))]
        self._names: list[str] = []  # of dense parameters, in the model's order
        self._versions: list[int | None] = [None] * len(self._servers)
        self._sequence: int | None = None
        self._tables: dict[str, tuple[EmbeddingEngine, SparseOptimizer]] = {}

    def push_model(
        self, model: nn.Module | Mapping[str, Any], optimizer: torch.optim.Optimizer
    ) -> PulledModel:
        """Give the servers a model and the optimizer of its steps; the first wins. Returns what they have.

        model: a module, or its parameters by name; their order is that of lists of gradients.
        """
        parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
        state = {
            "version": 0,
            "optimizer": describe(optimizer),
            "parameters": {name: _tensor(value) for name, value in parameters.items()},
            "slots": {name: {} for name in parameters},
            "waiting": [],
            "answers": {},
        }
        for server, share in zip(self._servers, split_state(state, len(self._servers)), strict=True):
            server.load_state(share, first=True)
        self._names = list(parameters)
        return self.pull_dense_parameters()

    @overload
    def pull_dense_parameters(
        self, version: int | None = None, *, into: nn.Module | None = None
    ) -> PulledModel: ...

    @overload
    def pull_dense_parameters(
        self, version: Sequence[int], model_versions: MutableSequence[int]
    ) -> tuple[dict[str, NDArray[Any]], list[int]]: ...

    def pull_dense_parameters(
        self,
        version: int | Sequence[int] | None = None,
        model_versions: MutableSequence[int] | None = None,
        *,
        into: nn.Module | None = None,
    ) -> PulledModel | tuple[dict[str, NDArray[Any]], list[int]]:
        """The parameters; with a version, only those of servers that have another one.

        into: a module whose parameters get the values. ElasticDL's own arguments are the numbers of servers
        and the version that the worker has of each, which is changed; it gets parameters by name, and the
        numbers of servers without a model, which are none after `push_model`.
        """
        if model_versions is not None:
            assert isinstance(version, Sequence)
            changed: dict[str, NDArray[Any]] = {}
            for number in version:
                base_version = model_versions[number] if model_versions[number] >= 0 else None
                newest, values = self._servers[number].pull(base_version)
                self._versions[number] = model_versions[number] = newest
                changed |= {name: np.array(value) for name, value in (values or {}).items()}
            return changed, []
        assert not isinstance(version, Sequence)
        pulled: dict[str, NDArray[Any]] = {}
        for number, server in enumerate(self._servers):
            self._versions[number], values = server.pull(version)
            pulled |= {name: np.array(value) for name, value in (values or {}).items()}
        if into is not None:
            self._copy(pulled, into)
        return PulledModel(self._version, pulled)

    def push_gradients(
        self,
        grads: Sequence[Any] | Mapping[str, Any],
        edl_grads: Sequence[NamedGradient] | Mapping[str, tuple[Any, Any]] | None = None,
        learning_rate: float | None = None,
        model_versions: Sequence[int] | None = None,
    ) -> PushResult:
        """Push gradients of the parameters that were pulled last, and those of embedding vectors.

        grads: a list in the order of the model's parameters, or by name, or a list of NamedGradient; None has
        no gradient. edl_grads: for each table (ids, a gradient for each id), or a list of NamedGradient;
        those of equal ids are added up. learning_rate: of this step, instead of the optimizers'.
        model_versions: that of each server which the gradients are of, if they are not those pulled last.
        """
        if model_versions is not None:
            if len(model_versions) != len(self._servers):
                raise ContractError(
                    f"model_versions expects a version for each of {len(self._servers)} servers, got "
                    f"{len(model_versions)}."
                )
            self._versions = list(model_versions)
        shares: list[dict[str, Tensor]] = [{} for _ in self._servers]
        for name, gradient in self._by_name(grads).items():
            if gradient is not None:
                shares[owner_of_parameter(name, len(shares))][name] = _tensor(gradient)
        rows = self._checked_rows(_rows_of(edl_grads or {}))  # raises before anything is sent
        result = PushResult(True, self._version)
        if any(shares):
            result = self._push_dense(shares, learning_rate)
        if result.accepted:
            self._push_rows(rows, learning_rate)
        return result

    def push_embedding_table_infos(
        self, infos: Iterable[EmbeddingTableInfo], optimizer: SparseOptimizer
    ) -> None:
        """Declare tables, which all workers do alike, and the optimizer of their rows, one of kv.optim."""
        from karvan.store.remote.store import RemoteStore  # imports Arrow Flight

        new_tables = list(infos)
        for info in new_tables:
            if info.name in self._tables:
                raise ContractError(f"There is an embedding table '{info.name}' already.")
        engines = {}
        for info in new_tables:  # each has a store of its own, so that each can be pushed alone
            table = Table(info.dim, name=info.name, init=initialiser_of(info.initializer))
            engines[info.name] = EmbeddingEngine({info.name: table}, store=RemoteStore(self._connection))
        optimizer.attach(nn.ModuleList(engines.values()))
        self._tables |= {name: (engine, optimizer) for name, engine in engines.items()}

    def pull_embedding_vectors(self, layer_name: str, embedding_ids: Any) -> NDArray[np.float32]:
        """The vectors of ids, in their order; those of new ids are initialised."""
        engine, _ = self._table(layer_name)
        keys, places, counts = np.unique(_ids(embedding_ids).numpy(), return_inverse=True, return_counts=True)
        asked = {layer_name: (keys, counts.astype(np.uint32))}
        rows_of_table = engine.store.lookup(asked, LookupContext(True, engine.step))
        vectors: NDArray[np.float32] = rows_of_table[layer_name].vectors[places]
        return vectors

    def partition_dense_parameters(self, param_names: Sequence[str]) -> None:
        """Nothing: servers divide parameters by their names."""

    def push_dense_parameters(self, *arguments: Any) -> NoReturn:
        """An error: it says what to use."""
        raise UnsupportedError(
            "push_dense_parameters",
            "push_model(model, optimizer) gives the servers parameters and the optimizer.",
        )

    pull_variable = pull_dense_parameters
    pull_embedding_vector = pull_embedding_vectors
    push_gradient = push_gradients

    def close(self) -> None:
        """Disconnect; the servers keep what they have."""
        self._connection.close()

    def __enter__(self) -> PSClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _version(self) -> int:
        return max((version for version in self._versions if version is not None), default=0)

    def _by_name(self, gradients: Sequence[Any] | Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(gradients, Mapping):
            return gradients
        if gradients and all(
            isinstance(gradient, tuple) and hasattr(gradient, "values") for gradient in gradients
        ):
            return _sums_of(gradients)
        if not self._names:
            raise ContractError("A list of gradients is in the order of push_model: call it before.")
        if len(gradients) != len(self._names):
            raise ContractError(
                f"push_gradients expects a gradient for each of {len(self._names)} parameters, got "
                f"{len(gradients)}."
            )
        return dict(zip(self._names, gradients, strict=True))

    def _push_dense(self, shares: Sequence[Mapping[str, Tensor]], rate: float | None) -> PushResult:
        """Push under one number to all servers; a rejected push uses its number again."""
        if None in self._versions:
            raise ContractError("Gradients are of parameters that were pulled: pull_dense_parameters first.")
        if self._sequence is None:
            self._sequence = max(server.next_sequence(self._worker) for server in self._servers)
        answers = [
            server.push_gradients(share, version or 0, trainer=self._worker, sequence=self._sequence, lr=rate)
            for server, share, version in zip(self._servers, shares, self._versions, strict=True)
        ]
        reasons = {answer.reason for answer in answers if not answer.accepted}
        if reasons & {"forgotten", "not finite"}:
            self._sequence += 1
            raise ValueError(
                "push_gradients expects finite gradients, got an infinity or a NaN."
                if "not finite" in reasons
                else "push_gradients expects one process for each worker_id, got a number used before."
            )
        if not reasons:
            self._sequence += 1
        return PushResult(not reasons, max(answer.version for answer in answers))

    def _push_rows(self, rows: Mapping[str, tuple[Tensor, Tensor]], rate: float | None) -> None:
        """Look the ids up once more, and give their vectors these gradients: a training step of the rows."""
        from karvan.store.remote.store import RemoteStore  # imports Arrow Flight

        optimizers = {id(optimizer): optimizer for optimizer in (self._table(table)[1] for table in rows)}
        for table, (ids, values) in rows.items():
            self._table(table)[0](Batch({table: ids}))[table].backward(values)
        for optimizer in optimizers.values():
            usual = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            try:
                optimizer.step()
            finally:
                optimizer.zero_grad()
                for group, lr in zip(optimizer.param_groups, usual, strict=True):
                    group["lr"] = lr
        for table in rows:  # other workers see the rows of a push that was accepted
            store = self._table(table)[0].store
            assert isinstance(store, RemoteStore)
            store.window.drain()

    def _checked_rows(self, rows_by_table: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Tensor, Tensor]]:
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for table, (ids, values) in rows_by_table.items():
            dim = self._table(table)[0].features[table].dim
            keys, gradients = _ids(ids), _tensor(values).float()
            if gradients.shape != (len(keys), dim):
                raise ContractError(
                    f"Gradients of '{table}' must have shape {(len(keys), dim)}, one for each id, got "
                    f"{tuple(gradients.shape)}."
                )
            if not torch.isfinite(gradients).all():
                raise ValueError(f"push_gradients expects finite gradients, got others of '{table}'.")
            rows[table] = (keys, gradients)
        return rows

    def _table(self, name: str) -> tuple[EmbeddingEngine, SparseOptimizer]:
        if name not in self._tables:
            raise ContractError(
                f"There is no embedding table '{name}'; push_embedding_table_infos declared: "
                f"{listed(name, self._tables)}"
            )
        return self._tables[name]

    def _copy(self, pulled: Mapping[str, NDArray[Any]], model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in pulled.items():
                if name not in parameters:
                    raise ContractError(
                        f"The servers have a parameter '{name}', but the module has: "
                        f"{listed(name, parameters)}"
                    )
                parameters[name].copy_(torch.from_numpy(value))


def build_ps_client(ps_addrs: str, logger: Any = None, **options: Any) -> PSClient:
    """The client of servers whose addresses are separated by commas; options are those of `PSClient`."""
    addresses = [address.strip() for address in ps_addrs.split(",") if address.strip()]
    if not addresses:
        raise ContractError(f"build_ps_client expects addresses as host:port,host:port, got '{ps_addrs}'.")
    return PSClient(addresses, **options)


def _sums_of(gradients: Iterable[NamedGradient]) -> dict[str, Any]:
    """Gradients by the names of their parameters; those of equal names are added up."""
    sums: dict[str, Any] = {}
    for gradient in gradients:
        if getattr(gradient, "indices", None) is not None:
            raise ContractError(
                f"Only tables have gradients of single rows: expected '{gradient.name}' in edl_grads."
            )
        values = _tensor(gradient.values)
        sums[gradient.name] = sums[gradient.name] + values if gradient.name in sums else values
    return sums


def _rows_of(
    gradients: Sequence[NamedGradient] | Mapping[str, tuple[Any, Any]],
) -> Mapping[str, tuple[Any, Any]]:
    """Ids and gradients by table."""
    if isinstance(gradients, Mapping):
        return gradients
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for gradient in gradients:
        ids, values = _ids(gradient.indices), _tensor(gradient.values)
        if gradient.name in rows:
            ids, values = (
                torch.cat([rows[gradient.name][0], ids]),
                torch.cat([rows[gradient.name][1], values]),
            )
        rows[gradient.name] = (ids, values)
    return rows


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))


def _ids(values: Any) -> Tensor:
    ids = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if ids.dim() != 1 or ids.is_floating_point():
        raise ContractError(
            f"Embedding ids must be whole numbers in a list, got {tuple(ids.shape)} {ids.dtype}."
        )
    return ids.to(torch.int64)


def build_channel(addr: str) -> str:
    """The address, for `PSClient([build_channel(addr)])`."""
    return addr
