"""File formats, one module or package each, and how files are found and opened."""
