"""The command line: `karvan demo`, `train`, `evaluate`, `predict`, `inspect`, `bench`, `doctor`, `version`.

One file for each command. Nothing here imports torch before a command needs it, so that help comes at once.
"""
