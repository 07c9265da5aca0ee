"""Where the programs and modules are that tests start and import: tests/support, a folder for each room.

`[tool.pytest.ini_options] pythonpath` lists these folders, and tests/conftest.py gives them to programs
that tests start, by PYTHONPATH.
"""

from pathlib import Path

_SUPPORT = Path(__file__).parent.parent


def support_path(name):
    """The path of a file of tests/support, such as `cluster/echo_role.py`."""
    path = _SUPPORT / name
    if not path.exists():
        raise FileNotFoundError(f"expected a file of tests/support, got {name!r}.")
    return path
