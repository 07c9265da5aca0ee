"""Rows on parameter servers: lookups in flight, and calls about tables."""
