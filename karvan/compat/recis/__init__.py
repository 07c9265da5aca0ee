"""The names of RecIS, over Karvan."""
