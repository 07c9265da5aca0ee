"""The table of roles: it has all that distinguishes a role, so that a role is added by a record."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_paths import support_path

from karvan.job.roles import Role, all_roles, role_of, start_order

PACKAGE = Path(__file__).parents[2] / "karvan"
NAMES = ("PARAMETER_SERVER", "EMBEDDING_WORKER", "LOADER", "TRAINER", "MASTER")
# Programs of PERSIA name its roles, whatever others there are.
OF_PERSIA = ("compat/persia/", "cli/persia_launcher.py")


def test_few_files_name_a_role():
    """What they ask of a role is in its record; the trainer is also the program of the user."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    naming = {
        name: [
            path
            for path, text in files.items()
            if re.search(rf"\bRole\.{name}\b", text) and not path.startswith(OF_PERSIA)
        ]
        for name in NAMES
    }
    most = dict.fromkeys(NAMES, 6) | {"TRAINER": 12}
    assert {name: paths for name, paths in naming.items() if len(paths) > most[name]} == {}


def test_a_job_runs_with_a_role_of_its_own(tmp_path):
    program = support_path("launch/own_role_program.py")
    command = [sys.executable, str(program), "job", str(tmp_path)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert (tmp_path / "sums").read_text() == "[40, 41, 40]"
    assert "adder-0 ended with code 1; it is restarted." in job.stdout


def test_roles_are_texts_and_have_one_object_each():
    assert Role.LOADER == "loader"
    assert f"{Role.LOADER}-1" == "loader-1"
    for role in all_roles():
        assert role_of(str(role)) is role
        assert copy.deepcopy(role) is role
        assert pickle.loads(pickle.dumps(role)) is role
    with pytest.raises(ValueError, match=r"Expected a role of parameter-server, .*master, got 'cook'"):
        role_of("cook")


def test_the_order_in_which_roles_start():
    expected = Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER, Role.LOADER, Role.TRAINER
    assert start_order() == expected
