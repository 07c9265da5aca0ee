"""Declarations of calls, against which every message is checked on arrival."""
