"""How roles talk: calls with arrays on Arrow Flight streams, each done once, whatever happens to connections.

server = Server(service, "127.0.0.1")          # a Service, which declares the calls that it takes
peer = Client("server 0", server.address)
answer = peer.call("pull", {"table": "user"}, [keys])
"""

from karvan.wire.client import Client, Reply
from karvan.wire.errors import BusyError, ListenError, PeerLostError, RefusedError, WireError
from karvan.wire.guard.limits import Limits
from karvan.wire.message import Array, Message
from karvan.wire.security.credentials import Security
from karvan.wire.server import Server
from karvan.wire.service import Caller, Request, Service, endpoints

__all__ = [
    "Array",
    "BusyError",
    "Caller",
    "Client",
    "Limits",
    "ListenError",
    "Message",
    "PeerLostError",
    "RefusedError",
    "Reply",
    "Request",
    "Security",
    "Server",
    "Service",
    "WireError",
    "endpoints",
]
