"""What workers use, under the paths of ElasticDL."""
