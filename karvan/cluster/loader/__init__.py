"""The loader: reads data for trainers."""
