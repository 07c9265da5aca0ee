"""What the services of a job say to each other: the declared calls of each service, for both sides."""
