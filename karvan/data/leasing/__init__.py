"""Data that is leased from the master of a job, task by task, instead of being divided over ranks."""
