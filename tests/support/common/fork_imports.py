"""Imports what forks of tests use, once for all of them; see `forked_programs`.

Python's garbage collector would look through all of that in each fork, which copies its memory: it is frozen.
"""

import atexit
import gc
import importlib
import weakref
from contextlib import suppress

_MODULES = [
    "pytest",
    "pandas",  # which pyarrow imports once it has made an array
    "torch",
    "torch._dynamo",  # which the first optimizer of torch imports
    "torch.distributed",
    "karvan.embedding",
    "karvan.distributed",
    "karvan.train.callbacks",
    "karvan.train.train_context",
    "karvan.train.losses",
    "karvan.train.trainer",
    "karvan.data",
    "karvan.cli.commands.jobs",
    "karvan.cli.commands.role",
    "karvan.cluster.loader.context",
    "karvan.cluster.embedding_worker.service",
    "karvan.cluster.parameter_server.service",
    "karvan.launch.job_spec",
    "karvan.launch.master",
    "karvan.launch.supervisor",
]

gc.disable()
for _name in _MODULES:
    with suppress(ImportError):  # some are not there on every machine
        importlib.import_module(_name)
for _finalizer in list(weakref.finalize._registry):
    # torch would take each of its operators out of its tables when a fork ends, which copies their memory.
    if _finalizer.peek()[1].__module__ == "torch.library":
        _finalizer.atexit = False
gc.freeze()
atexit.register(gc.unfreeze)  # extensions tell of what is left when the process ends
gc.enable()
