"""A Ray cluster on this machine, at first of one node: `python ray_cluster_program.py FOLDER`.

It writes its address to FOLDER/address, and ends when none of the processes that have a file FOLDER/users/PID
is alive. So the processes of a test run share one, and a run that is killed leaves none behind. A file
FOLDER/orders/add-NAME adds a node with one of the resource NAME, whose raylet is in FOLDER/nodes/NAME. A file
FOLDER/orders/fill-head has actors that must be on this machine be on other nodes than the first one.
"""

import fcntl
import os
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

STORE = 80 << 20
HEAD = {
    "num_cpus": 16,
    "num_gpus": 2,  # whatever this machine has: Ray counts what it is told
    "include_dashboard": False,
    "object_store_memory": STORE,
    "resources": {"scarce": 1},
}


def add_node(cluster, resources):
    """Add a node; its raylet."""
    node = cluster.add_node(num_cpus=16, object_store_memory=STORE, resources=resources)
    [raylet] = node.all_processes["raylet"]
    return raylet.process


@ray.remote
class Holder:
    """Holds resources."""

    def wait(self):
        """Answer once it does."""


def fill_head(cluster):
    """Take all of the resource by which Ray knows the machine, of the first node; what holds it."""
    ray.init(address=cluster.address, log_to_driver=False)  # at the first node
    here = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    machine = {f"node:{ray.util.get_node_ip_address()}": 1.0}
    holder = Holder.options(num_cpus=0, resources=machine, scheduling_strategy=strategy).remote()
    ray.get(holder.wait.remote())
    return holder


def is_used(users):
    alive = False
    for user in users.iterdir():
        try:
            os.kill(int(user.name), 0)
            alive = True
        except ProcessLookupError:
            user.unlink(missing_ok=True)
    return alive


def ends(folder):
    """Whether nobody uses the cluster; nobody finds it any more then."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unused = not is_used(folder / "users")
        if unused:
            (folder / "address").unlink()
    return unused


def write(path, text):
    """Write a file that is whole from the start."""
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    write(folder / "address", cluster.address)
    raylets = []
    while not ends(folder):
        if (fill := folder / "orders" / "fill-head").exists():
            holder = fill_head(cluster)
            fill.unlink()
        for order in (folder / "orders").glob("add-*"):
            name = order.name.removeprefix("add-")
            raylets.append(add_node(cluster, {name.partition("-")[0]: 1}))
            write(folder / "nodes" / name, raylets[-1].pid)
            order.unlink()
        for raylet in raylets:
            raylet.poll()  # one that was killed must not stay a zombie: its workers would take it for alive
        time.sleep(0.1)
    cluster.shutdown()
