"""Data shards, under the paths of elasticai_api."""
