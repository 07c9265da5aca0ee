"""The names of RecIS, over Karvan."""

__version__ = "1.0.0"
"""The version of RecIS that most names are of."""
