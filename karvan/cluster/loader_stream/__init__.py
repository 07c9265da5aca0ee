"""The batches of a job's loaders, for a trainer."""
