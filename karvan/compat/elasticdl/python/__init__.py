"""The modules of ElasticDL under their own paths; what they have is in `karvan/compat/elasticdl`."""
