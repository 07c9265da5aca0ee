"""The parameter server: rows and dense parameters of a job."""
