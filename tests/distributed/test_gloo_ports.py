"""Ports of gloo: closed to strangers once ranks are connected, while groups that come later still connect."""

import pytest
from ranks_helpers import run


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "network"])
def test_nobody_connects_to_gloo_once_ranks_are_connected(transport):
    for rank, found in enumerate(run(2, "port_programs:strangers", transport=transport)):
        ports = ["program"] if rank else ["program", "store"]  # torch's own store, at MASTER_PORT of rank 0
        assert found == {"open": ports, "sum": [2.0, 2.0, 2.0], "later": 2.0}
