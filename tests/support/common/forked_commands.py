"""`python`, `karvan` and `torchrun` in the shells of tests: each one is a fork; see `forked_programs`.

`forked_commands(folder)` writes them into a folder for the front of PATH. Such a command is a small program
that sends its arguments, environment, folder and streams over a socket of that folder; a thread of the test
starts the fork. Signals that the command receives reach the fork, it ends as the fork does, and if it is
killed, so is the fork. When the test leaves the `with`, forks that still run are killed.
"""

import ast
import contextlib
import os
import socket
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path

from forked_programs import ForkedProgram

_INSTALLED = Path(sys.executable).parent
_COMMANDS = {"python": [], "karvan": [_INSTALLED / "karvan"], "torchrun": [_INSTALLED / "torchrun"]}

# Modules that a bare interpreter has: this one starts in a few milliseconds.
_PROGRAM = """#!{python} -IS
import _signal, _socket, os, sys
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
connection.connect({address!r})
request = ascii((os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ))).encode()
streams = (0).to_bytes(4, sys.byteorder) + (1).to_bytes(4, sys.byteorder) + (2).to_bytes(4, sys.byteorder)
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
connection.sendmsg([b"%8d" % len(request)], rights)
for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM):
    _signal.signal(number, lambda number, frame: connection.send(bytes([number])))
while request:
    request = request[connection.send(request):]
code = int(connection.recv(8))
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code != _signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def forked_commands(folder):
    """The environment of a shell in which the commands are forks."""
    folder.mkdir()
    server = _Server(folder / "socket")
    for name in _COMMANDS:
        (folder / name).write_text(_PROGRAM.format(python=sys.executable, address=server.address))
        (folder / name).chmod(0o700)
    try:
        yield {
            **os.environ,
            "PATH": os.pathsep.join([str(folder), str(_INSTALLED), os.environ["PATH"]]),
            "PYTHON_EXEC": str(folder / "python"),  # with which torchrun starts the ranks
        }
    finally:
        server.close()


class _Server:
    """Starts a fork for each connection."""

    def __init__(self, path):
        self.address = str(path)
        self._lock = threading.Lock()  # starting a process asks all others whether they have ended
        self._programs = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for program in self._programs:
                program.kill()

    def _accept(self):
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            request = connection.recv(int(size), socket.MSG_WAITALL)
            name, words, folder, environment = ast.literal_eval(request.decode())
            if words[0] == "-u":  # from torchrun
                del words[0]
            command = [sys.executable, *_COMMANDS[name], *words]
            stdin, stdout, stderr = streams
            with self._lock:
                program = ForkedProgram(
                    command, env=environment, cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr
                )
                self._programs.append(program)
            for stream in streams:
                os.close(stream)
            while program.sentinel not in wait([program.sentinel, connection]):
                if not (number := connection.recv(1)):  # the command was killed
                    program.kill()
                    break
                program.send_signal(number[0])
            with self._lock:
                code = program.wait()
            with contextlib.suppress(BrokenPipeError):
                connection.send(b"%d" % code)
