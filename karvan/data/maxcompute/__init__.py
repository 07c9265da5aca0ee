"""Tables of MaxCompute (also known as ODPS) as data."""
