"""Checkpoints of RecIS and PERSIA: read from their files, and written as checkpoints of Karvan."""
