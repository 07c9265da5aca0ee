"""A role that is a member of the registry and notes its start and heartbeats in FOLDER/events.

It makes progress until there is a file FOLDER/stall-ROLE; a trainer waits for loader 0 if that stalls. A
trainer ends with the code in FOLDER/end-trainer.
"""

import json
import os
import sys
import time

from karvan.activity import activity
from karvan.discovery.directory import Membership
from karvan.wire import Client, Security, client

folder = sys.argv[1]
role, index = os.environ["KARVAN_ROLE"], int(os.environ["KARVAN_INDEX"])


def note(event):
    line = json.dumps({"event": event, "name": f"{role}-{index}", "pid": os.getpid()})
    with open(f"{folder}/events", "ab", 0) as file:
        file.write(f"{line}\n".encode())


def there(file):
    return os.path.exists(f"{folder}/{file}")


class Noted(Client):
    def call(self, declared, *rest, **options):
        said = super().call(declared, *rest, **options)
        note(declared.name)
        return said


def hang_for_ever(file):
    note("stalled")
    while there(file):
        time.sleep(0.01)


def work():
    while not (role == "trainer" and there("end-trainer")):
        if there(f"stall-{role}"):
            hang_for_ever(f"stall-{role}")
        elif role == "trainer" and there("stall-loader"):
            with activity.waiting("loader-0"):
                while there("stall-loader"):
                    time.sleep(0.01)
        activity.advance()
        time.sleep(0.01)


note("start")
client.Client = Noted
Membership(os.environ["KARVAN_REGISTRY"], role, index, "127.0.0.1:1", Security.from_environment(), beat=0.1)
with activity.task("fit" if role == "trainer" else ""):
    work()
with open(f"{folder}/end-trainer") as order:
    sys.exit(int(order.read()))
