"""The Ray engine: processes on the nodes of a Ray cluster. Nothing else of Karvan imports Ray."""
