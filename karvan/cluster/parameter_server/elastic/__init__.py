"""A parameter server in an elastic run: pushes are staged, and applied when the trainers commit a step."""
