"""Leased records that the loaders of a job read, for a trainer."""
