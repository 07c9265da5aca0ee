"""Features and their operations, over `kv.Feature`."""
