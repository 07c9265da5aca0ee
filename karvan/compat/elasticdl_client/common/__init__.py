"""Constants and logging, under the paths of elasticdl_client."""
