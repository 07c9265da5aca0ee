"""The processes of a job and their addresses: the registry, its members, and how clients find them."""
