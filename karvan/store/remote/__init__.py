"""Rows on parameter servers: lookups in flight, and what concerns tables."""
