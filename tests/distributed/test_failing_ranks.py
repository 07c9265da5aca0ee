"""A fit that fails on one rank ends there with its own error, and on the others with one that names it."""

import pytest
import torch
from ranks_helpers import start

pytestmark = pytest.mark.slow


def ended(folder, function, **arguments):
    """How both processes end, what they have said, and their numbers."""
    processes = start(2, function, folder, **arguments)
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, [(folder / f"{rank}.log").read_text() for rank in (0, 1)], [p.pid for p in processes]


@pytest.mark.parametrize(
    ("where", "transport", "victim"),
    [
        ("callback", "network", 1),
        ("loss", "memory", 1),
        ("callback", "memory", 0),
        ("loss", "network", 0),
    ],
)
def test_the_rank_that_fails_ends_with_its_own_error_and_the_other_names_it(
    tmp_path, where, transport, victim
):
    codes, said, pids = ended(
        tmp_path, "trainer_programs:fail", where=where, transport=transport, victim=victim
    )
    assert codes == [1, 1], said
    assert said[victim].rstrip().endswith(f"ZeroDivisionError: the {where} fails"), said[victim]
    other = said[1 - victim]
    # With rank 0 goes the store, in which it has told why.
    names = f"RankError: Rank {victim} (process {pids[victim]}" if victim else "RankError: "
    last = next(line for line in reversed(other.splitlines()) if "RankError: " in line)
    assert names in last
    assert f"has failed with ZeroDivisionError: the {where} fails" in last or "ank 0" in last
    assert not any("terminate called" in text or "Fatal Python error" in text for text in said), said


@pytest.mark.parametrize("transport", ["memory", "network"])
def test_one_that_catches_the_error_can_disconnect_and_end(tmp_path, transport):
    codes, said, pids = ended(
        tmp_path, "trainer_programs:fail_and_disconnect", where="loss", transport=transport, victim=1
    )
    assert codes == [0, 0], said
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert second == "ZeroDivisionError: the loss fails"
    assert first.startswith(f"RankError: Rank 1 (process {pids[1]}")


def test_a_label_that_cannot_be_meant_ends_all_ranks_and_names_its_column(tmp_path):
    codes, said, _ = ended(tmp_path, "trainer_programs:bad_labels", victim=1)
    assert codes == [1, 1], said
    text = "Column 'label' has 1 of 4 labels outside of 0 to 1, such as 5"
    assert f"ValueError: {text}" in said[1]
    assert "RankError: Rank 1" in said[0]
    assert text in said[0]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"dense_reduce": "bf16"}, "kill"),
        ({"powersgd": {"rank": 1, "start_step": 0}}, "raise"),
        ({"average_every": 3}, "kill"),
    ],
)
def test_the_other_names_it_however_dense_parameters_are_kept_equal(tmp_path, options, how):
    codes, said, pids = ended(tmp_path, "communication_programs:fail", victim=1, options=options, how=how)
    assert codes == [1, 1 if how == "raise" else -9], said
    last = next(line for line in reversed(said[0].splitlines()) if "RankError: " in line)
    assert f"RankError: Rank 1 (process {pids[1]}" in last
    assert not any("terminate called" in text or "Fatal Python error" in text for text in said), said
