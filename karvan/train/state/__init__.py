"""What a run saves and resumes from."""
