"""Batches on their way to training: read ahead, taken in step by all ranks."""
