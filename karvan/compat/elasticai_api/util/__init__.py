"""Logging and addresses, under the paths of elasticai_api."""
