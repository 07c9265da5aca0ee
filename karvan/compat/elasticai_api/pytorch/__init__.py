"""What loops of PyTorch use, under the paths of elasticai_api."""
