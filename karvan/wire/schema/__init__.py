"""Declarations of calls, by which every message is checked once, at the border."""
