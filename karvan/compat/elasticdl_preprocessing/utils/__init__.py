"""Statistics of features, under the paths of ElasticDL's preprocessing library."""
