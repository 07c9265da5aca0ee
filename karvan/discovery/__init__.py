"""Who is in a job and where: the registry, its members, and how clients find them."""
