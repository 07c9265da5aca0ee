"""Failures of the place are not counted as the program's own; those of the program are."""

import json
import sys

import pytest
from launch_helpers import Running, small_commands
from support_paths import support_path

TEMPORARY = 75


class Ordered(Running):
    """A job whose trainers, and servers if there are some, end as they are ordered."""

    def __init__(self, folder, orders, servers=(), **more):
        for role, its in (("trainer", orders), ("parameter-server", servers)):
            for index, order in enumerate(its):
                (folder / f"{role}-{index}.json").write_text(json.dumps(order))
        command = (sys.executable, "-IS", str(support_path("launch/failing_program.py")), str(folder))
        commands = {**small_commands(folder), "trainer": command, "parameter-server": command}
        roles = {"trainers": len(orders)} | ({"parameter_servers": len(servers)} if servers else {})
        super().__init__(folder, roles, commands=commands, checkpoints=str(folder / "run"), **more)

    def starts(self, name):
        return (self.folder / "started").read_text().splitlines().count(name)


def test_temporary_failures_from_one_checkpoint_do_not_end_a_job(tmp_path):
    with Ordered(tmp_path, [[{"code": TEMPORARY}] * 5 + [{"code": 0}]]) as job:
        assert job.outcome().code == 0
    assert job.starts("trainer-0") == 6
    assert any(
        "trainer-0 ended with code 75 (a temporary failure); all trainers" in each for each in job.lines
    )


def test_temporary_failures_between_failures_of_the_program_do_not_excuse_them(tmp_path):
    codes = [1, TEMPORARY, 1, TEMPORARY, TEMPORARY, 1]
    with Ordered(tmp_path, [[{"code": code} for code in codes]]) as job:
        outcome = job.outcome()
    assert outcome.code == 1
    assert "again without a newer checkpoint" in outcome.failure
    assert job.starts("trainer-0") == len(codes)


@pytest.mark.parametrize("loss", ["rollback", "reload"])
def test_a_server_that_runs_out_of_memory_again_from_one_checkpoint_ends_the_job(tmp_path, loss):
    end = {"code": 1, "line": "error: parameter-server 0 is out of memory: std::bad_alloc"}
    stays = [{"code": 0, "after": "never"}] * 4
    with Ordered(tmp_path, [stays], servers=[[end]], on_server_loss=loss) as job:
        outcome = job.outcome()
    assert outcome.code == 1
    assert outcome.failure.splitlines() == [
        "parameter-server-0 ended with code 1, again without a newer checkpoint. It said:",
        "error: parameter-server 0 is out of memory: std::bad_alloc",
    ]
    assert job.starts("parameter-server-0") == 3


def test_the_number_of_restarts_bounds_temporary_failures_with_their_code(tmp_path):
    order = [{"code": TEMPORARY, "line": "error: /run: No space left on device."}]
    with Ordered(tmp_path, [order], max_restarts=4) as job:
        outcome = job.outcome()
    assert outcome.code == TEMPORARY
    assert outcome.failure.splitlines() == [
        "trainer-0 ended with code 75 (a temporary failure), after 4 restarts within 600 seconds. It said:",
        "error: /run: No space left on device.",
    ]
    assert job.starts("trainer-0") == 5


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1), (3, 1)])
def test_a_rank_that_merely_follows_does_not_hide_why_another_failed(tmp_path, code, starts):
    """The follower ends first, as it often does, and the one that failed a moment later."""
    follower = {"code": TEMPORARY, "line": "error: Rank 0 has failed."}
    failing = {"code": code, "line": "error: the reason.", "seconds": 0.3}
    with Ordered(tmp_path, [[failing], [follower]]) as job:
        outcome = job.outcome()
    assert outcome.code == code
    assert outcome.failure.startswith("trainer-0 ended with code")
    assert outcome.failure.endswith("It said:\nerror: the reason.")
    assert job.starts("trainer-0") == starts


def test_a_rank_that_ends_alone_for_the_place_is_restarted_with_the_others(tmp_path):
    """The other rank neither ends nor says anything: after a moment the end of the first one counts."""
    stays = [{"code": 0, "after": "never"}, {"code": 0}]
    with Ordered(tmp_path, [[{"code": TEMPORARY}, {"code": 0}], stays]) as job:
        assert job.outcome().code == 0
    assert job.starts("trainer-0") == job.starts("trainer-1") == 2
    assert any("trainer-0 ended with code 75" in each for each in job.lines)
