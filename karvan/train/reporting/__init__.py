"""Reports of a fit: results, progress, history and loggers."""
