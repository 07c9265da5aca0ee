"""The modules of `recis.nn`."""
