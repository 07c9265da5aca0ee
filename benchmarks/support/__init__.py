"""What benchmarks compute with: simulations that take measured costs."""
