"""Writing and reading checkpoints: saves in flight, shares of ranks, locks."""
