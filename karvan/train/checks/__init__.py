"""Checks before and during training: mistakes are errors that say what to do."""
