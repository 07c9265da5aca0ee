"""A role that is a member of the registry and notes its heartbeats in FOLDER/events, besides its start."""

import json
import os
import sys
import threading

from karvan.wire.membership import Membership

folder = sys.argv[1]
role, index = os.environ["KARVAN_ROLE"], int(os.environ["KARVAN_INDEX"])


def note(event):
    line = json.dumps({"event": event, "name": f"{role}-{index}", "pid": os.getpid()})
    with open(f"{folder}/events", "ab", 0) as file:
        file.write(f"{line}\n".encode())


class Noted(Membership):
    def _call(self, method, deadline):
        said = super()._call(method, deadline)
        note(method)
        return said


note("start")
Noted(os.environ["KARVAN_REGISTRY"], role, index, "127.0.0.1:1", beat=0.1)
threading.Event().wait()
