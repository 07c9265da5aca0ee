"""The embedding worker: looks up rows for trainers."""
