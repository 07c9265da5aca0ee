"""The host tier: rows beyond the GPU memory that tables may take, in the memory of the machine."""
