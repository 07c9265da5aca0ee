"""Callbacks, under the paths of ElasticDL."""
