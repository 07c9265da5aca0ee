"""Rows of tables in device memory: where they are, how keys find them, and how they come and go."""
