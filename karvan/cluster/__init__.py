"""The roles of a job that outgrows one process, and the services they offer."""
