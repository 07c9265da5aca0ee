"""Metrics inside of models, over `kv.metrics`."""
