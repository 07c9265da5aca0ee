"""The keys of a config: `karvan train my.yaml`. Unknown keys, and wrong values, are errors that name them.

Values that name one of Karvan's or torch's classes (a model, a loss, an optimizer, …) are a name alone, or a
mapping with `name` and arguments, which are checked against the class's parameters when it is created, in
`build_job.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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

from karvan.cli.errors import CommandError
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
