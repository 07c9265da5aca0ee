"""An embedding worker that kills itself, by DIE_AT=PUSH,SERVER, in one of the pushes of its trainers.

The push of that number, from 1, is staged by that server, and no other server hears of it; by none if it is
-1.
"""

import os
import signal

from karvan.cluster.role_process import RoleSettings, factory_of, serve
from karvan.distributed.parameter_servers import Servers
from karvan.job.roles import Role

peer = Servers.peer
last_push, chosen = map(int, os.environ["DIE_AT"].split(","))
pushes = 0  # begun, at server 0


class DyingClient:
    """Sends a push to one server, and dies when that is answered."""

    def __init__(self, client, server):
        self.client, self.server = client, server

    def begin(self, method, head, *rest, **options):
        global pushes
        pushes += self.server == 0
        if pushes < last_push:
            return self.client.begin(method, head, *rest, **options)
        if self.server == chosen:
            self.client.begin(method, head, *rest, **options).wait()
        if chosen in (self.server, -1):
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def dying_peer(servers, server, channel="train"):
    found = peer(servers, server, channel)
    return DyingClient(found, server) if channel == "push" else found


Servers.peer = dying_peer
serve(factory_of(Role.EMBEDDING_WORKER), RoleSettings.from_environment(Role.EMBEDDING_WORKER))
