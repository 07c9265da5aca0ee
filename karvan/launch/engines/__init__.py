"""Engines: how the processes of a job are started."""
