"""Ranks that meet at a job's registry, as those of a launched job do, in place of torch's own store."""

import pytest
from ranks_helpers import run
from test_failing_ranks import ended

from karvan.discovery.registry import Registry
from karvan.wire import Security

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-this-test-alone"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry that the processes of a test find in their environment."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    one = Registry(security=Security(token=TOKEN))
    monkeypatch.setenv("KARVAN_REGISTRY", one.address)
    monkeypatch.setenv("KARVAN_ROLE", "trainer")
    monkeypatch.setenv("KARVAN_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("KARVAN_GENERATION", "0")
    yield one
    one.close()


@pytest.mark.parametrize("transport", ["memory", "network"])
def test_no_port_of_torch_is_open_and_groups_that_come_later_connect(registry, transport):
    for found in run(2, "port_programs:strangers", transport=transport):
        assert found == {"open": ["program"], "sum": [2.0, 2.0, 2.0], "later": 2.0}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_is_named_even_if_it_is_the_first(tmp_path, registry, victim):
    """With torch's own store, which is in rank 0, what rank 0 has told goes with it."""
    codes, said, pids = ended(
        tmp_path, "trainer_programs:fail", where="callback", transport="network", victim=victim
    )
    assert codes == [1, 1], said
    last = next(line for line in reversed(said[1 - victim].splitlines()) if "RankError: " in line)
    assert f"RankError: Rank {victim} (process {pids[victim]}" in last
    assert "has failed with ZeroDivisionError: the callback fails" in last
    assert not any("terminate called" in text or "Fatal Python error" in text for text in said), said


def test_ranks_of_a_generation_that_is_over_do_not_meet(tmp_path, registry):
    registry.begin_generation(1)
    codes, said, _ = ended(tmp_path, "port_programs:strangers", transport="memory")
    assert codes == [1, 1], said
    refused = "expected to be of generation 1, got 0: the job has continued without"
    assert all(refused in text for text in said), said
