"""What PERSIA's names have in common: configurations, layouts of batches, models with their tables."""
