"""The lines of `gpu.py`: a file for each group of them, and what they share."""
