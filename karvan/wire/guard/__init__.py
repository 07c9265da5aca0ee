"""Limits on the connections, streams and log lines that the callers of a service can cause."""
