"""The config of `karvan train my.yaml`: its keys, and the `kv.TrainingJob` that is made of it.

Unknown keys, and wrong values, are errors that name them. Values that name one of Karvan's or torch's classes
(a model, a loss, an optimizer, …) are a name alone, or a mapping with `name` and arguments, which are checked
against the class's parameters when it is created.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

import karvan as kv
from karvan.argument_checks import listed
from karvan.cli.output import CommandError, refusing
from karvan.data.columns.declarations import column_from_settings
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.settings import (
    Count,
    CountOrZero,
    FolderOrURL,
    Integer,
    Positive,
    Section,
    parse,
    problem_text,
    read_settings,
)
from karvan.train.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger


class Named(BaseModel):
    """A class by name, with arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments, without the name."""
        return dict(self.model_extra or {})


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _named_or(default: str) -> BeforeValidator:
    """A class by name; arguments without a name are for the default class."""

    def complete(value: Any) -> Any:
        value = _named(value)
        return {"name": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(complete)


Choice = Annotated[Named, BeforeValidator(_named)]
Paths = Annotated[list[str], BeforeValidator(_listed)]
Names = Annotated[list[str], BeforeValidator(_listed)]


class Column(Section):
    """A column that is read differently from what its type suggests; see docs/data.md."""

    name: str
    kind: Literal["fixed", "varlen", "raw"] = "fixed"
    default: float | int | str | list[float] | None = None
    length: Count | None = None
    dtype: Literal["int64", "float32", "float64", "bool"] | None = None
    hash: Literal["farm", "murmur", "farm63", "murmur63"] | None = None
    bucket: CountOrZero | None = None


class Data(Section):
    """Files or tables, and how they are read; the options of `kv.data.read`."""

    train: Paths
    eval: Paths | None = None
    batch_size: Count = 4096
    eval_batch_size: Count | None = None
    shuffle: CountOrZero = 0
    seed: Integer = 0
    columns: list[str | Column] | None = None
    labels: list[str] = Field(default_factory=list)
    format: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    workers: Count = 2
    device: str | None = None
    retry_seconds: Annotated[float, Field(ge=0)] = 60.0


class Table(Section):
    """A table's options; see docs/guide.md."""

    name: str | None = None
    combiner: Literal["sum", "mean", "mean_by_count", "mean_by_density", "sqrtn"] = "mean"
    use_weights: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    init: Choice | None = None
    admit: Choice | None = None
    evict: Choice | None = None
    device: Literal["cpu", "cuda"] | None = None
    read_only: bool = False
    missing: Literal["error", "empty"] = "error"
    padding_idx: int | None = None


class Model(Named):
    """A model of kv.models with its arguments; `table` is for all ids, `tables` for some by name."""

    table: Table | None = None
    tables: dict[str, Table] = {}
    wide_table: Table | None = None


class Optimizers(Section):
    """One of torch.optim for the net, and one of kv.optim for the tables; null if all of them are frozen."""

    dense: Annotated[Named | None, _named_or("Adam")] = Named(name="Adam")
    sparse: Annotated[Named | None, _named_or("Adagrad")] = Named.model_validate(
        {"name": "Adagrad", "lr": 0.05}
    )
    schedule: Choice | None = None
    schedule_per: Literal["step", "epoch"] = "step"


class Early(Section):
    """Stop when a metric does not improve any more."""

    metric: str
    patience: Count = 1
    mode: Literal["max", "min"] = "max"
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class WarmStartSection(Section):
    """The checkpoint that a new run starts from; the options of `kv.checkpoint.warm_start`."""

    path: FolderOrURL
    tables: Paths = Field(default=["*"])
    dense: Paths = Field(default=["*"])
    exclude: Paths = Field(default_factory=list)
    rename: dict[str, str] = Field(default_factory=dict)
    optimizer_state: bool = True


class DenseReduceSection(Section):
    """How ranks average dense gradients; `rank` and `start_step` are those of `kv.train.PowerSGD`."""

    name: Literal["mean", "bf16", "fp16", "powersgd"] = "mean"
    rank: Count | None = None
    start_step: CountOrZero | None = None

    @property
    def options(self) -> dict[str, int]:
        """The options of PowerSGD that are set."""
        return {name: value for name in ("rank", "start_step") if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _only_powersgd_has_options(self) -> DenseReduceSection:
        if self.options and self.name != "powersgd":
            raise ValueError(f"{' and '.join(self.options)} is for powersgd, got {self.name}")
        return self


class Train(Section):
    """How long to train, and how a step is made."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "log_every": "loggers.every",
        "checkpoint_every": "checkpoints.every",
    }

    epochs: Count | None = None
    max_steps: Count | None = None
    eval_every: Count | None = None
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    frozen: Names = Field(default_factory=list)
    gradient_accumulation_steps: Count = 1
    global_accumulation_steps: Count | None = None
    clip_norm: Positive | None = None
    clip_value: Positive | None = None
    dense_reduce: Annotated[DenseReduceSection, BeforeValidator(_named)] = DenseReduceSection()
    average_every: Count = 1
    find_unused_parameters: bool = False
    device: str | None = None
    seed: Integer = 0
    prefetch: CountOrZero = 2
    early_stopping: Early | None = None
    warm_start: WarmStartSection | None = None


class Best(Section):
    """The metric whose best checkpoint is not deleted."""

    metric: str
    mode: Literal["max", "min"] = "max"


class Saved(Section):
    """Checkpoints; without a folder there are none."""

    folder: FolderOrURL | None = None
    every: Count | None = None
    seconds: Positive | None = 600.0
    tolerate_failed_saves: CountOrZero = 3
    save_retry_seconds: Annotated[float, Field(ge=0)] = 60.0
    keep_last: Count | None = 3
    keep_best: Best | None = None
    full_every: Count = 1
    writers: Annotated[int, Field(ge=1, le=256)] = 3


class LogSection(Section):
    """Files to which the numbers of training are logged, every `every` steps; without it, 50 to 100 times."""

    csv: Path | None = None
    jsonl: Path | None = None
    tensorboard: Path | None = None
    every: Count | None = None


class Predict(Section):
    """Columns to write with the predictions."""

    columns: list[str] = Field(default_factory=list)


class Config(Section):
    """A complete config."""

    connect: Choice | None = None  # the kind and the options of `kv.connect`
    data: Data
    features: dict[str, list[str | dict[str, Any]]] = Field(default_factory=dict)
    model: Annotated[Model, BeforeValidator(_named)]
    # A mapping with `name` is one loss; otherwise it is several losses by name.
    loss: Annotated[Named | dict[str, Choice], Field(union_mode="left_to_right"), BeforeValidator(_named)] = (
        Named(name="BinaryCrossEntropy")
    )
    optimizers: Optimizers = Optimizers()
    train: Train = Train()
    metrics: list[Choice] | dict[str, Choice] = Field(default=[Named(name="AUC")])
    checkpoints: Saved = Saved()
    loggers: LogSection = LogSection()
    predict: Predict = Predict()


def read_config(path: Path, settings: Mapping[str, str]) -> Config:
    """Read a config, with changed values such as {"train.epochs": "3"}."""
    return read_settings(Config, path, settings)


def convert(name: str, text: str, kind: Any) -> Any:
    """Convert text of the command line to a value of an annotated type."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(text)
    except ValidationError as first:
        try:
            parsed = parse(text)
            value = adapter.validate_python(parsed)
            if isinstance(parsed, bool) and not isinstance(value, bool):
                raise ValueError(f"{parsed} is not a number")
            return value
        except (ValueError, yaml.YAMLError):
            expected = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
            problem = first.errors()[0]["msg"]
            raise CommandError(
                f"{name} must be {expected}, got '{text}': {problem_text(problem)}."
            ) from first


# Finds classes by name, checks their arguments and creates them; errors name the config key.


def classes_of(module: Any, base: type) -> dict[str, Any]:
    """The public classes of a module that derive from one."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and name[0] != "_"
    }


def find_class(what: str, classes: Mapping[str, Any], name: str) -> Any:
    """The class of that name."""
    if name not in classes:
        raise CommandError(f"There is no {what} '{name}'; there are: {listed(name, sorted(classes))}")
    return classes[name]


def make_by_name(
    what: str, classes: Mapping[str, Any], choice: Named, where: str, hidden: Sequence[str] = ()
) -> Any:
    """Create one of the known classes with its arguments; `hidden` are arguments that the caller adds."""
    kind = find_class(what, classes, choice.name)
    check_arguments(kind, where, (), choice.arguments, hidden)
    return build(where, kind, **choice.arguments)


def check_arguments(
    kind: Callable[..., Any],
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hidden: Sequence[str],
) -> None:
    """Raise unless `kind` can be called with these arguments; the error lists those it has."""
    signature = inspect.signature(kind)
    allowed = [name for name in signature.parameters if name not in hidden]
    for name in kwargs:
        if name not in allowed:
            raise CommandError(f"{where}: unknown key '{name}'; there are: {listed(name, allowed)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CommandError(f"{where}: {error}; it takes: {', '.join(allowed) or 'nothing'}.") from error


def build(where: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `make`; its errors name the key of the config."""
    with refusing(TypeError, ValueError, where=f"{where}: "):
        return make(*args, **kwargs)


def values_of(where: Any, names: str) -> dict[str, Any]:
    """Some attributes of a section or a module, by their names."""
    return {name: getattr(where, name) for name in names.split()}


_ADMISSIONS = values_of(kv.admission, "Always MinCount Probability ReadOnly")
_EVICTIONS = values_of(kv.eviction, "Never LRU LFU Age TTL Norm")
# Keys of a config that are arguments of the same name.
_OF_TRAINER = (
    "frozen precision gradient_accumulation_steps global_accumulation_steps clip_norm clip_value "
    "average_every find_unused_parameters device prefetch"
)
_OF_TABLE = "name combiner use_weights device read_only missing padding_idx"
_OF_READ = "format seed workers device retry_seconds"


def make_job(config: Config, *, training: bool = True, progress: Any = "auto") -> kv.TrainingJob:
    """The job of a config; without `training` its training data is not opened."""
    connect_tables(config.connect)
    torch.manual_seed(config.train.seed)
    transform = make_features(config.features)
    model = make_model(config.model)
    loss = make_loss(config.loss)
    train, saved, stop = config.train, config.checkpoints, config.train.early_stopping
    trainer: kv.Trainer = build(
        "train",
        kv.Trainer,
        model,
        loss,
        dense_optimizer=_dense(config.optimizers.dense),
        sparse_optimizer=_sparse(config.optimizers.sparse),
        metrics=make_metrics(config.metrics, loss),
        scheduler=_schedule(config.optimizers.schedule),
        schedule_per=config.optimizers.schedule_per,
        dense_reduce=_dense_reduce(train.dense_reduce),
        callbacks=[] if stop is None else [kv.callbacks.EarlyStopping(**dict(stop))],
        loggers=_loggers(config.loggers),
        log_every=config.loggers.every,
        progress=progress,
        checkpoints=_checkpoints(saved),
        checkpoint_every=saved.every,
        checkpoint_seconds=saved.seconds,
        **values_of(saved, "tolerate_failed_saves save_retry_seconds"),
        **values_of(train, _OF_TRAINER),
    )
    data = config.data
    return kv.TrainingJob(
        trainer,
        _read(data, data.train, data.batch_size, transform, data.labels, shuffle=data.shuffle)
        if training
        else (),
        # Data to predict may lack labels; an evaluation asks for those of its loss.
        eval_data=_read(
            data,
            data.eval,
            data.eval_batch_size or data.batch_size,
            transform,
            data.labels if training else (),
        )
        if data.eval
        else None,
        **values_of(train, "epochs max_steps eval_every"),
        predict_columns=tuple(config.predict.columns),
        warm_start=None if train.warm_start is None else dict(train.warm_start),
    )


def connect_tables(config: Named | None) -> None:
    """Choose where tables are, by `kv.connect`: `cuda`, or `{name: cuda, …}` with its options.

    The trainers of a launched job have them on its parameter servers, unless the config says otherwise.
    """
    if config is None and JobEnvironment.read().role == Role.TRAINER:
        config = Named(name="remote")
    if config is None:
        return
    check_arguments(kv.connect, "connect", (config.name,), config.arguments, ("kind",))
    build("connect", kv.connect, config.name, **config.arguments)


def make_features(chains: Mapping[str, Sequence[str | Mapping[str, Any]]]) -> kv.FeatureEngine | None:
    """Chains of steps: `price: [log1p]`, `age: [{bucketize: [18, 35]}]`, `ab: [{cross: [a, b]}]`."""
    classes = _steps()
    built = []
    for name, steps in chains.items():
        feature = kv.Feature(name)
        for step in steps:
            where = f"features.{name}"
            if isinstance(step, Mapping) and len(step) != 1:
                raise CommandError(f"{where}: a step is one name with its arguments, got {dict(step)!r}.")
            kind, arguments = (step, {}) if isinstance(step, str) else next(iter(step.items()))
            if kind not in classes:
                raise CommandError(f"{where}: there is no step '{kind}'; there are: {', '.join(classes)}.")
            args, kwargs = _step_arguments(classes[kind], arguments)
            check_arguments(classes[kind], f"{where}.{kind}", (feature, *args), kwargs, ("self",))
            feature = build(where, getattr(feature, kind), *args, **kwargs)
        built.append(feature)
    return kv.FeatureEngine(built) if built else None


def make_model(config: Model) -> torch.nn.Module:
    """A model of kv.models."""
    classes = classes_of(kv.models, torch.nn.Module)
    kind = find_class("model", classes, config.name)
    arguments = config.arguments
    dim = arguments.get("dim", inspect.signature(kind).parameters["dim"].default)
    like = _table(config.table or Table(), dim, "model.table")
    if config.table is not None or config.tables:
        names = arguments.get("ids", ())
        tables = dict.fromkeys(names, like)
        for name, table in config.tables.items():
            # Options that a table does not set are those of `model.table`.
            merged = {**dict(config.table or {}), **table.model_dump(exclude_unset=True)}
            tables[name] = _table(Table.model_validate(merged), dim, f"model.tables.{name}")
        arguments["table"] = tables
    if config.wide_table is not None:
        wide = _table(config.wide_table, 1, "model.wide_table")
        arguments["wide_table"] = (
            wide if config.wide_table.init else replace(wide, init=kv.init.Constant(0.0))
        )
    check_arguments(kind, "model", (), arguments, ())
    model: torch.nn.Module = build("model", kind, **arguments)
    return model


def make_loss(choices: Named | Mapping[str, Named]) -> Any:
    """A loss of kv.losses, or several by name, each with an optional `times`."""
    if isinstance(choices, Named):
        return make_by_name("loss", _losses(), choices, "loss")
    losses, weights = {}, {}
    for name, choice in choices.items():
        arguments = choice.arguments
        if "times" in arguments:
            weights[name] = float(arguments.pop("times"))
        losses[name] = make_by_name("loss", _losses(), Named(name=choice.name, **arguments), f"loss.{name}")
    return kv.losses.Sum(losses, weights)


def _losses() -> dict[str, Any]:
    return classes_of(kv.losses, kv.losses.ColumnLoss)


def make_metrics(choices: Sequence[Named] | Mapping[str, Named], loss: Any) -> dict[str, Any]:
    """Metrics of kv.metrics, a list or by names; the output is that of a single loss."""
    classes = classes_of(kv.metrics, kv.metrics.Metric)
    if not isinstance(choices, Mapping):
        choices = _by_short_name([(find_class("metric", classes, choice.name), choice) for choice in choices])
    return {
        name: make_by_name("metric", classes, _of_loss(classes, choice, loss), f"metrics.{name}")
        for name, choice in choices.items()
    }


def _by_short_name(metrics: Sequence[tuple[Any, Named]]) -> dict[str, Named]:
    named: dict[str, Named] = {}
    for kind, choice in metrics:
        if kind.short_name in named:
            raise CommandError(
                f"metrics: the list contains {choice.name} twice; give each a name of its own: "
                f"{{a: {{name: {choice.name}, …}}, b: {{name: {choice.name}, …}}}}."
            )
        named[kind.short_name] = choice
    return named


def _of_loss(classes: Mapping[str, Any], metric: Named, loss: Any) -> Named:
    """The metric with the output of a single loss; its label is set by the Trainer."""
    if not isinstance(loss, kv.losses.ColumnLoss):
        return metric
    parameters = inspect.signature(find_class("metric", classes, metric.name)).parameters
    usual = {"output": loss.output} if "output" in parameters else {}
    return Named(name=metric.name, **{**usual, **metric.arguments})


def _table(config: Table, dim: int, where: str) -> kv.Table:
    usual = kv.init.Uniform(-(dim**-0.5), dim**-0.5)
    parts: dict[str, Any] = {
        "init": usual
        if config.init is None
        else make_by_name("init", classes_of(kv.init, kv.init.Initialiser), config.init, f"{where}.init"),
        "admit": kv.admission.Always()
        if config.admit is None
        else make_by_name("admission", _ADMISSIONS, config.admit, f"{where}.admit"),
        "evict": kv.eviction.Never()
        if config.evict is None
        else make_by_name("eviction", _EVICTIONS, config.evict, f"{where}.evict"),
    }
    table: kv.Table = build(
        where,
        kv.Table,
        dim,
        dtype=getattr(torch, config.dtype),
        **values_of(config, _OF_TABLE),
        **parts,
    )
    return table


def _sparse(config: Named | None) -> kv.optim.SparseOptimizer | None:
    if config is None:
        return None
    classes = classes_of(kv.optim, kv.optim.SparseOptimizer)
    optimizer: Any = make_by_name("sparse optimizer", classes, config, "optimizers.sparse", ("params",))
    return optimizer  # type: ignore[no-any-return]


def _dense(config: Named | None) -> Callable[[Any], torch.optim.Optimizer] | None:
    classes = classes_of(torch.optim, torch.optim.Optimizer)
    return _maker("dense optimizer", classes, config, "optimizers.dense", "params")


def _schedule(config: Named | None) -> Callable[[Any], Any] | None:
    schedulers = torch.optim.lr_scheduler
    classes = classes_of(schedulers, schedulers.LRScheduler)
    return _maker("schedule", classes, config, "optimizers.schedule", "optimizer")


def _maker(
    what: str, classes: Mapping[str, Any], choice: Named | None, where: str, first: str
) -> Callable[[Any], Any] | None:
    """A function that creates one of the known classes with its first argument, which is known later."""
    if choice is None:
        return None
    kind, arguments = find_class(what, classes, choice.name), choice.arguments
    check_arguments(kind, where, (None,), arguments, (first,))
    return lambda argument: build(where, kind, argument, **arguments)


def _dense_reduce(config: DenseReduceSection) -> str | kv.train.PowerSGD:
    return kv.train.PowerSGD(**config.options) if config.name == "powersgd" else config.name


def _checkpoints(config: Saved) -> kv.Checkpoints | None:
    if config.folder is None:
        return None
    best = config.keep_best
    return kv.Checkpoints(
        config.folder,
        keep_best=None if best is None else (best.metric, best.mode),
        **values_of(config, "keep_last full_every writers"),
    )


def _loggers(config: LogSection) -> list[Logger]:
    kinds: dict[str, Callable[[Any], Logger]]
    kinds = {"csv": CSVLogger, "jsonl": JSONLinesLogger, "tensorboard": TensorBoardLogger}
    return [make(getattr(config, name)) for name, make in kinds.items() if getattr(config, name) is not None]


def _read(
    data: Data,
    paths: Sequence[str],
    batch_size: int,
    transform: kv.FeatureEngine | None,
    labels: Sequence[str],
    shuffle: int = 0,
) -> kv.data.Loader | kv.data.SharedData:
    try:
        return kv.data.read(
            list(paths),
            batch_size,
            columns=None if data.columns is None else [_column(column) for column in data.columns],
            labels=labels,
            options=data.options or None,
            shuffle=shuffle,
            transform=transform,
            **values_of(data, _OF_READ),
        )
    except kv.data.DataError:
        raise
    except (TypeError, ValueError) as error:
        raise CommandError(f"data: {error}") from error


def _column(choice: str | Column) -> kv.data.Column | str:
    settings = choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
    with refusing(ValueError):
        return column_from_settings(settings)


def _steps() -> dict[str, Callable[..., Any]]:
    others = ("then", "width", "outputs")
    return {
        name: method
        for name, method in vars(kv.Feature).items()
        if inspect.isfunction(method) and name[0] != "_" and name not in others
    }


def _step_arguments(method: Callable[..., Any], values: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(values, Mapping):
        arguments = dict(values)
        columns = arguments.pop("columns", ())
        return ([columns] if isinstance(columns, str) else list(columns)), arguments
    several = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(method).parameters.values())
    return (list(values) if several and isinstance(values, list) else [values]), {}
