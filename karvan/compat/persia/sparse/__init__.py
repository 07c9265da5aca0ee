"""`persia.sparse`: the first generation's name of `persia.embedding`."""
