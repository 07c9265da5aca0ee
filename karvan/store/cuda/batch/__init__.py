"""Batches on a device: lookups, and updates by gradients."""
