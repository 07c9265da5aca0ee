"""The master of a launched job: registry, supervisor and ledger in one process, and calls about the job."""
