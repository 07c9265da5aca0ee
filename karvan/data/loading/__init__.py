"""From a source to batches: splits, shuffling, shares of ranks, prefetching on threads, positions."""
