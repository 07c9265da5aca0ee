"""Dense parameters that are on servers: the trainers' side of them, and what both sides know."""
