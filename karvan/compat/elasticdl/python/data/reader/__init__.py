"""The contract of readers, under the paths of ElasticDL."""
