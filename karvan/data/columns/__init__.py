"""Columns: their declarations, and decoding from Arrow to tensors."""
