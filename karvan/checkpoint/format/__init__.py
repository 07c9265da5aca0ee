"""The files of a checkpoint; docs/checkpoint.md describes them."""
