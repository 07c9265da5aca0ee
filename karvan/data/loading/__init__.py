"""From a source to batches: splits, shuffling, shares of ranks, read-ahead on threads, positions."""
