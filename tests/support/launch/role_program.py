"""A role that does nothing but note what happens to it, in FOLDER/events.

It ends with the code that FOLDER/end-ROLE has, if there is such a file. Files in FOLDER change what it does:
`stubborn` lets it live on after SIGTERM, `parent` lets it start a child, `family` three: one beside it, one
in a session of its own, and a daemon whose parent has ended. `once` lets an order to end be for one process
only.
"""

import json
import os
import signal
import subprocess
import sys
import time

folder = sys.argv[1]
role = os.environ["KARVAN_ROLE"]
name = f"{role}-{os.environ['KARVAN_INDEX']}"
NOTED = ("KARVAN_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_SOCKET_", "NCCL_SOCKET_", "OMP_", "MINE")


def note(event, **more):
    line = json.dumps({"event": event, "name": name, "pid": os.getpid(), **more})
    file = os.open(f"{folder}/events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def there(file):
    return os.path.exists(f"{folder}/{file}")


def asked(number, frame):
    note("asked")
    if not there("stubborn"):
        os._exit(143 if role == "trainer" else 0)


signal.signal(signal.SIGTERM, asked)
SLEEP = ["sleep", "1000"]


def daemon():
    """A process in a session of its own that has lost its parent."""
    script = f"import subprocess; print(subprocess.Popen({SLEEP}, start_new_session=True, stdout=2).pid)"
    return int(subprocess.run([sys.executable, "-IS", "-c", script], stdout=subprocess.PIPE).stdout)


family = []
if there("family"):
    family = [subprocess.Popen(SLEEP, start_new_session=own).pid for own in (False, True)] + [daemon()]
child = subprocess.Popen(["sleep", "1000"]).pid if there("parent") else None
print(f"{name} was here", flush=True)
note(
    "start",
    child=child,
    family=family,
    env={key: value for key, value in os.environ.items() if key.startswith(NOTED)},
)
while not there(f"end-{role}"):
    time.sleep(0.01)
with open(f"{folder}/end-{role}") as order:
    code = int(order.read())
if there("once"):
    os.remove(f"{folder}/end-{role}")
sys.exit(code)
