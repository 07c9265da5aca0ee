"""The calls between the processes of a job: the declarations of each service's calls, for both sides."""
