"""Roles: the processes of a job, what each of them serves, and how they find each other."""
