"""A trainer's streams of batches: from loaders, and from the tasks that loaders read."""
