"""Jobs of several roles: what a job says, the supervisor that keeps it going, the engines that run it."""
