"""The master of a job as a detached actor of a Ray cluster."""
