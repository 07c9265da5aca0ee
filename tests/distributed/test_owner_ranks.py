"""Several ranks and one folder: rank 0 owns it for all, and all are refused together."""

import os
import subprocess
import sys

import pytest
from ranks_helpers import run
from support_paths import support_path

OWNER = support_path("owner/owner_program.py")


@pytest.mark.slow
def test_all_ranks_are_refused_or_none(tmp_path):
    with subprocess.Popen(
        [sys.executable, OWNER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout.readline() == "owned\n"
        results = run(2, "owner_programs:fit", place=str(tmp_path))
        assert [result["step"] for result in results] == [0, 0]
        for result in results:
            assert f"belongs to a run that is training: process {owner.pid} " in result["error"]
        owner.kill()
    results = run(2, "owner_programs:fit", place=str(tmp_path))
    assert results == [{"step": 2, "error": None}] * 2
    assert ".karvan-owner.json" not in os.listdir(tmp_path)
