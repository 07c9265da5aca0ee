"""Bounds on what the callers of a service may take: connections, streams, and refusals that are logged."""
