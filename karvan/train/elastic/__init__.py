"""Training by trainers that come and go, without losing a record or a step."""
