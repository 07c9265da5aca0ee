"""The command line: `karvan demo`, `train`, `evaluate`, `predict`, `inspect`, `launch`, `bench`, and others.

One file for each command. Nothing here imports torch before a command needs it, so that help appears at once.
"""
