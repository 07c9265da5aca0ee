"""Which rank or server owns a key, and the messages between owners and callers."""
