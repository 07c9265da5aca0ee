"""Datasets, over `kv.data.read`."""
