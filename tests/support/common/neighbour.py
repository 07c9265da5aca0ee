"""Another user of this machine: programs that run as uid nobody."""

import os
import sys

import pytest
from forked_programs import run_forked

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may take the uid of another user")

# Imports come first: the interpreter's own folder may be closed to other users.
_PREPARE = f"""
import os, socket, sys, time
from karvan.discovery.registry import Registry
from karvan.wire import Client, Message, RefusedError, Security, WireError
from karvan.discovery.directory import Directory
from karvan.discovery.directory import Membership
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def run_as_neighbour(program, *arguments):
    """What a program prints that another user runs, after the imports above."""
    command = [sys.executable, "-c", _PREPARE + program, *map(str, arguments)]
    done = run_forked(command)
    assert done.returncode == 0, done.stderr
    return done.stdout
