"""Remote calls with arrays over Arrow Flight streams; each is executed once, even if connections break.

server = Server(service, "127.0.0.1")          # a Service, which declares the calls that it accepts
peer = Client("server 0", server.address)
answer = peer.call("pull", {"table": "user"}, [keys])
"""

from karvan.errors import BusyError, ListenError, PeerLostError, RefusedError, WireError
from karvan.wire.client import Client, Reply
from karvan.wire.message import Array, Message
from karvan.wire.security import Security
from karvan.wire.server import Caller, Endpoint, Limits, Request, Server, Service, endpoints

__all__ = [
    "Array",
    "BusyError",
    "Caller",
    "Client",
    "Endpoint",
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
