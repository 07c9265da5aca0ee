"""Damaged files of every format: an error that names the file, or all records; never fewer, never a crash.

Formats without checksums cannot notice every changed value, but a record that is missing is always noticed.
The files are read in another process, so that a crash of a library is a failed test and not the end of all.
"""

import random
import sys
from pathlib import Path

import pytest
from forked_programs import run_forked
from rows import FORMATS, options, read_all, table, write

from karvan.data.columns.declarations import infer
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files

ROWS, GROUP = 60, 25
SECONDS = 60


def damage(content, draw):
    """Some bytes changed, a piece cut out, or a piece repeated; ends of files are where the footers are."""
    damaged = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 4, 20])):
        near_end = max(0, len(damaged) - 1 - draw.randrange(min(len(damaged), 900)))
        damaged[draw.randrange(len(damaged)) if draw.random() < 0.6 else near_end] = draw.randrange(256)
    where, size = draw.randrange(len(damaged)), draw.randrange(1, 50)
    kind = draw.random()
    if kind < 0.15:
        del damaged[where : where + size]
    elif kind < 0.3:
        damaged[where:where] = damaged[where : where + size]
    return bytes(damaged)


def read_damaged(kind, folder, rounds):
    """Read many damaged files; they must be whole, or a DataError that names the file."""
    whole = write(table(ROWS), Path(folder) / f"whole.{kind}", GROUP)
    path = Path(folder) / f"damaged.{kind}"
    for seed in range(rounds):
        path.write_bytes(damage(whole.read_bytes(), random.Random(seed)))
        try:
            source = open_files(path, **options(path))
            promised = sum(part.records for part in source.parts())
            rows = read_all(source)
            Decoder(infer(source.schema))(rows.combine_chunks().to_batches()[0])
        except DataError as error:
            if "damaged." not in str(error) and error.column is None:
                raise AssertionError(f"seed {seed}: nothing is named") from error
            continue
        lines = kind in ("csv", "tsv")  # a changed line end is another number of records, in text
        assert rows.num_rows == promised, f"seed {seed}: {rows.num_rows} records"
        assert lines or promised == ROWS, f"seed {seed}: {promised} records"


def read_all_damaged(folder, rounds):
    for kind in FORMATS:
        read_damaged(kind, folder, rounds)
        print(kind, flush=True)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("fuzz")
    rounds = 100 if pytestconfig.getoption("thorough") else 40
    code = f"import test_fuzz; test_fuzz.read_all_damaged({str(folder)!r}, {rounds})"
    return run_forked([sys.executable, "-c", code], timeout=SECONDS, cwd=Path(__file__).parent)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_errors_or_whole(outcome, kind):
    assert kind in outcome.stdout.split(), f"exit status {outcome.returncode}\n{outcome.stderr[-2000:]}"
