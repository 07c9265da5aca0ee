"""Types of tasks, under the paths of elasticai_api."""
