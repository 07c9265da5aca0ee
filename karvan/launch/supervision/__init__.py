"""The supervisor of a job: what starts when, and what a death means."""
