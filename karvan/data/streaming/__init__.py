"""Endless data: Kafka, iterables, folders that appear in time."""
