"""Opens streams to a service and says as little as it is told: `python idle_streams.py ADDRESS COUNT MODE`.

MODE: "silent" opens streams and sends nothing; "begin" sends their schema; "hello" says hello and opens no
stream of calls; "idle" opens both streams and makes no call. The token is in KARVAN_TOKEN. Holds them until
its input ends.
"""

import json
import os
import sys

import pyarrow.flight as flight

from karvan.wire.message import SCHEMA


def hold(address, count, mode, token):
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])

    def stream(client, first=None, begin=True):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"karvan"), options)
        if begin:
            writer.begin(SCHEMA)
        if first is not None:
            writer.write_metadata(json.dumps({**first, "arrays": []}).encode())
        return writer, reader

    held = []
    for number in range(count):
        client = flight.FlightClient(f"grpc://{address}")
        held.append(client)
        try:
            if mode in ("silent", "begin"):
                held.append(stream(client, begin=mode == "begin"))
                continue
            name = f"idle {number}"
            held.append(stream(client, {"method": "hello", "session": name, "connection": name}))
            held[-1][1].read_chunk()
            if mode == "idle":
                held.append(stream(client, {"method": "calls", "connection": name}))
        except (flight.FlightError, OSError, StopIteration):  # refused: held as it is
            pass
    return held


if __name__ == "__main__":
    held = hold(sys.argv[1], int(sys.argv[2]), sys.argv[3], os.environ["KARVAN_TOKEN"])
    print("held", flush=True)
    sys.stdin.read()
    os._exit(0)
