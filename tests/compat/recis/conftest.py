"""Data of the tests of RecIS's names."""

import pytest
from recis_clicks import write_files


@pytest.fixture
def files(tmp_path):
    """A folder with two ORC files of 40 records."""
    return write_files(tmp_path)
