"""A rank's clients of parameter servers and embedding workers."""
