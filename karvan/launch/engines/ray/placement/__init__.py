"""Where processes run in a Ray cluster."""
