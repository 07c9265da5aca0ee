"""Readers of data, under the paths of ElasticDL."""
