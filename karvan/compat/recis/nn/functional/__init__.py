"""Operations on tensors, each by the feature operation that does the same."""
