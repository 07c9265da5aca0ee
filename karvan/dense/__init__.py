"""Dense parameters on servers: the trainers' side, and what trainers and servers share."""
