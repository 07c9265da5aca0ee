"""A role with a service that gives back what it gets: `python echo_role.py`, with the command's options."""

import sys
from dataclasses import replace
from errno import ENOSPC
from functools import partial

from karvan.cli.main import main
from karvan.job.roles import Role, add_role
from karvan.wire import Message, Service


class Echo(Service):
    def __init__(self, settings):
        self.name = settings.name

    def answer(self, call, caller):
        if call.head["method"] == "raise":
            raise {"MemoryError": MemoryError, "OSError": partial(OSError, ENOSPC)}[call.head["kind"]](
                "no room"
            )
        return Message(call.head, call.arrays)

    def close(self):
        print("closed", flush=True)


def make(settings):
    return Echo(settings)


if __name__ == "__main__":
    add_role(replace(Role.LOADER, factory="echo_role:make"))
    sys.exit(main(["role", *sys.argv[1:]]))
