"""The history of a run of several ranks: one file, and the same DataFrame on all of them."""

import json
import math

from ranks_helpers import run

TIMELESS = ("kind", "step", "epoch", "samples", "loss", "auc", "rows", "rows/user")


def timeless(entries):
    known = [{name: entry.get(name) for name in TIMELESS} for entry in entries]
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in entry.items()
        }
        for entry in known
    ]


def test_all_ranks_have_the_history_that_rank_0_writes_also_after_resuming(tmp_path):
    (first, whole), (other_first, other_whole) = run(
        2, "history_programs:train_and_resume", place=str(tmp_path)
    )
    assert timeless(first) == timeless(other_first)
    assert timeless(whole) == timeless(other_whole)
    assert timeless(whole)[: len(first)] == timeless(first)
    assert [entry["step"] for entry in whole if entry["kind"] == "train"] == list(range(1, 11))
    assert [entry["step"] for entry in whole if entry["kind"] == "eval"] == [5, 10]
    written = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert timeless(written) == timeless(whole)


def test_ranks_agree_on_the_steps_after_which_rank_0_shows_numbers():
    (shown, *steps), (nothing, *other_steps) = run(2, "history_programs:train_and_show")
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [1, 2, 5, 10, 12]
    assert all("  2 processes " in line for line in lines)
    assert "  job     2 trainers, each with a part of the rows\n" in shown
    assert nothing == ""
    assert steps == other_steps == [[*range(1, 13)], [*range(1, 111)]]
