"""What all processes of a job agree on: roles, environment variables, modes."""
