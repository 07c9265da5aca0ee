"""Opens a stream to the address it is given, says so, and holds it until the other side is gone."""

import sys

import pyarrow.flight as flight

client = flight.FlightClient(f"grpc://{sys.argv[1]}")
writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"x"))
print("held", flush=True)
reader.read_chunk()
