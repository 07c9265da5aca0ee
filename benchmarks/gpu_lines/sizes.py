"""How large everything is that is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """The sizes of all lines; those that have a public counterpart are its sizes."""

    rounds: int = 5  # in which candidates take turns
    steps: int = 40  # of a turn
    dim: int = 128
    sets: int = 4  # different batches, so that none is in the cache
    copied: int = 1 << 29  # floats of the copy that gives the bandwidth

    repeats: int = 10  # of the work in a graph
    slots: int = 1 << 24  # of the index
    loads: tuple[float, ...] = (0.5, 0.75)  # shares of the slots that are used
    queries: int = 1 << 22
    inserted: int = 1 << 20

    tables: int = 10  # of the public dynamicemb benchmark: 1,048,570 lookups
    lookups: int = 104_857
    universe: int = 20_000_000  # keys of a table, of which a batch has some 43,000
    host_rounds: int = 60

    features: int = 26
    batch: int = 65_536
    bag_rows: int = 1_000_000
    bag_steps: int = 5

    numbers: int = 13
    model_keys: int = 4_000_000
    bottom: tuple[int, ...] = (512, 256)  # and dim
    top: tuple[int, ...] = (1024, 1024, 512, 256)  # and 1

    files: int = 16
    file_batches: int = 3  # of each file
    epochs: int = 4  # of a fit
    fit_rounds: int = 3
    traced: int = 20  # steps

    tier_checked: int = 600_000  # samples of a check of results
    tier_rows: int = 8_000_000
    tier_table_rows: int = 640_000  # of each of `features` tables
    tier_batches: int = 450
    tier_table_batches: int = 60
    tier_warm: int = 200  # steps before any is timed
    tier_share: int = 4  # the rows are so many times those that fit on the device


QUICK = replace(
    Sizes(),
    rounds=2,
    steps=20,
    copied=1 << 28,
    host_rounds=20,
    bag_steps=3,
    file_batches=1,
    fit_rounds=2,
    traced=10,
    tier_rows=4_000_000,
    tier_table_rows=0,
    tier_batches=200,
    tier_warm=60,
)
