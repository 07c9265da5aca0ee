"""Training and evaluation in loops of one's own."""
