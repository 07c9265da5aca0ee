"""The names of ElasticDL's preprocessing library, over Karvan's steps of features and its tables."""
