"""Jobs of several roles: the job's specification, the supervisor that keeps it running, the engines."""
