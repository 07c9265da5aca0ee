"""Training and evaluation in custom loops."""
