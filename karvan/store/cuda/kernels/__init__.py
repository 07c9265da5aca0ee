"""Triton kernels of tables in device memory; they also run in Triton's interpreter, on the CPU."""
