"""Tables in device memory: open-addressing indexes and rows that Triton kernels find, pool and update."""
