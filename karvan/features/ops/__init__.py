"""The steps of feature chains, one kind each."""
