"""Files of records, under the paths of elasticai_api."""
