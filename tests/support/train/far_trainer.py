"""elastic_trainer.py in a network namespace, if FAR names it and its interface, as NAME/INTERFACE.

FAR_TRAINERS: the indices of those trainers that are there, separated by commas; all, if it is not set.
"""

import ctypes
import os
import runpy
from pathlib import Path

CLONE_NEWNET = 0x40000000


def enter(name):
    """Be in a network namespace from now on, with all threads that begin later."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


own = os.environ["KARVAN_INDEX"]
if "FAR" in os.environ and own in os.environ.get("FAR_TRAINERS", own).split(","):
    far, interface = os.environ["FAR"].split("/")
    enter(far)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
runpy.run_path(str(Path(__file__).with_name("elastic_trainer.py")), run_name="__main__")
