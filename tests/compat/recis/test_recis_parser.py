"""The argument parser of RecIS's example programs, which fills dataclasses."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from karvan.compat.recis.framework.trainer import TrainingArguments
from karvan.compat.recis.utils.parser import ArgumentParser


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Word(str, enum.Enum):  # noqa: UP042 - as programs for older Pythons write it
    LEFT = "on the left"


@dataclass
class Rates:
    dense: float = 0.1
    sparse: float = 0.2


@dataclass
class Reading:
    paths: str
    size: int
    drop: bool
    prefetch: int = 1
    columns: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = (1,)
    most: int | None = None
    side: Side = Side.LEFT
    mode: Literal["a", "b"] = "a"
    word: Word = Word.LEFT
    name: str | None = "None"
    pair: tuple[float, float] = (0.5, 0.25)
    mixed: tuple[int, str] = (1, "a")
    nested: list[list[int]] = field(default_factory=list)
    change: Callable[[Any], Any] | None = None
    rates: Rates = field(default_factory=lambda: Rates(sparse=0.5))
    count: int = field(default=0, init=False)


GIVEN = "--paths=x,y --size 3 --drop=true"


def parsed(words, *kinds, **options):
    parser = ArgumentParser(prog="program")
    for kind, dest in kinds or ((Reading, "io"),):
        parser.add_arguments(kind, dest=dest, **options)
    return parser.parse_args(words.split())


def test_fields_have_their_defaults_or_what_the_arguments_say():
    assert parsed(GIVEN).io == Reading("x,y", 3, True)
    words = "--prefetch 7 --columns a b --sizes 4 5 --most 2 --side RIGHT --mode b --dense 1e-3"
    made = parsed(f"{GIVEN} {words}").io
    assert made == Reading("x,y", 3, True, 7, ["a", "b"], (4, 5), 2, Side.RIGHT, "b", rates=Rates(0.001, 0.5))
    assert parsed(f"{GIVEN} --pair 1 2").io.pair == (1.0, 2.0)
    assert parsed(f"{GIVEN} --most 2 --most None --columns").io == Reading("x,y", 3, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--drop", True), ("--drop TRUE", True), ("--drop=0", False), ("--nodrop", False), ("--io.nodrop", 0)],
)
def test_a_bool_is_a_word_or_a_flag(words, expected):
    assert parsed(f"--paths x --size 3 {words}").io.drop is bool(expected)


def test_dataclasses_that_share_a_name_need_where_it_belongs(capsys):
    kinds = ((Rates, "lr"), (Rates, None))
    made = parsed("--lr.dense 3 --Rates.dense 4", *kinds)
    assert (made.lr, made.Rates) == (Rates(3.0), Rates(4.0))
    assert set(vars(made)) == {"lr", "Rates"}
    with pytest.raises(SystemExit):
        parsed("--dense 3", *kinds)
    assert "unrecognized arguments: --dense" in capsys.readouterr().err


def test_an_object_or_a_default_gives_the_defaults():
    assert parsed("--dense 3", (Rates(1.0, 2.0), "lr")).lr == Rates(3.0, 2.0)
    assert parsed("--x_dense 3", (Rates, "lr"), default=Rates(1.0, 2.0), prefix="x_").lr == Rates(3.0, 2.0)


def test_arguments_of_argparse_are_beside_them():
    parser = ArgumentParser()
    parser.add_argument("--size", type=int, default=1)
    parser.add_arguments(Reading, dest="io")
    made, rest = parser.parse_known_args(f"{GIVEN} --io.size 9 --other".split())
    assert (made.size, made.io.size, rest) == (3, 9, ["--other"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--size 3 --drop=true", "the following arguments are required: --io.paths/--paths"),
        ("--paths x --size many --drop=true", "argument --io.size/--size: invalid int value: 'many'"),
        ("--paths x --size 3 --drop=perhaps", "expected true or false, got 'perhaps'"),
        (f"{GIVEN} --side UP", "expected one of LEFT, RIGHT, got 'UP'"),
        (f"{GIVEN} --most many", "invalid int value: 'many'"),
        (f"{GIVEN} --pair 1", "argument --io.pair/--pair: expected 2 arguments"),
        (f"{GIVEN} --mixed 1 b", "unrecognized arguments: --mixed 1 b"),
        (f"{GIVEN} --nested 1", "unrecognized arguments: --nested 1"),
    ],
)
def test_wrong_arguments_are_said_as_argparse_says_them(words, text, capsys):
    with pytest.raises(SystemExit):
        parsed(words)
    assert text in capsys.readouterr().err


def test_a_field_that_arguments_cannot_give_needs_a_default():
    @dataclass
    class Odd:
        made: Callable[[], int]

    with pytest.raises(TypeError, match=r"expects a default for 'odd.made', since .*Callable"):
        parsed("", (Odd, "odd"))
    with pytest.raises(TypeError, match="add_arguments expects a dataclass, got <class 'int'>"):
        ArgumentParser().add_arguments(int)
    with pytest.raises(ValueError, match="another dest than 'lr'"):
        parsed("", (Rates, "lr"), (Rates, "lr"))


def test_training_arguments_stand_beside_a_prefetch_of_the_programs_own():
    words = f"{GIVEN} --prefetch=2 --gradient_accumulation_steps=4 --output_dir out --train_steps 7"
    made = parsed(words, (Reading, "io"), (TrainingArguments, "train"))
    assert made.io.prefetch == 2
    assert made.train == TrainingArguments(4, "out", train_steps=7)


def test_the_help_has_all_fields():
    parser = ArgumentParser(prog="program")
    parser.add_arguments(Reading, dest="io")
    assert "--io.most MOST, --most MOST" in parser.format_help()
