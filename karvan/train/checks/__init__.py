"""Checks before and during training: what is wrong is an error with what to do."""
