"""Constants and logging, under the paths of ElasticDL."""
