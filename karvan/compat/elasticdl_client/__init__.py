"""The names of elasticdl_client: constants; its commands are those of `karvan run --as elasticdl`."""
