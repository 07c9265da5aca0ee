"""The names of elasticai_api, over Karvan: elastic data shards for loops of plain PyTorch."""
