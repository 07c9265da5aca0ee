"""Variable-length data in RecIS's form."""
