"""What ranks do to show which ports of gloo a stranger can reach; run by `test_gloo_ports.py`."""

import os
import socket

import torch
import torch.distributed as dist

import karvan as kv


def _open_ports():
    """Ports of this process that somebody can connect to."""
    from port_helpers import connects, listening

    return [each.port for each in listening(os.getpid()) if connects(each.host, each.port, 0.3)]


def strangers(transport):
    """Which ports are open after connect, and whether groups still work, also one that is made later."""
    unrelated = socket.create_server(("127.0.0.1", 0))  # of the program, such as a page of metrics
    connection = kv.connect("sharded", transport=transport, timeout=60)
    names = {unrelated.getsockname()[1]: "program", int(os.environ["MASTER_PORT"]): "store"}
    found = _open_ports()
    total = connection.main.sum(torch.ones(3))
    parameter = torch.nn.Linear(2, 1)
    torch.nn.parallel.DistributedDataParallel(parameter)(torch.ones(1, 2)).sum().backward()
    later = dist.new_group(backend="gloo")
    value = torch.ones(1)
    dist.all_reduce(value, group=later)
    connection.main.barrier()
    kv.distributed.disconnect()
    return {
        "open": sorted(names.get(port, "unknown") for port in found),
        "sum": total.tolist(),
        "later": value.item(),
    }
