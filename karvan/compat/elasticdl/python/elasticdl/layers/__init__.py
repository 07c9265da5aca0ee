"""Layers, under the paths of ElasticDL."""
