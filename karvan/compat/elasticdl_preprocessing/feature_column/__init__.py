"""Feature columns, under the paths of ElasticDL's preprocessing library."""
