"""A loader that reads the job's data and hangs while there is a note that says so."""

import json
import os
import time
from pathlib import Path

import karvan as kv

data = json.loads(os.environ["KARVAN_DATA"])
hang = Path(data["train"]).parent.parent / "notes" / "hang"


def hang_for_ever():
    while hang.exists():
        time.sleep(0.01)


class Source:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            if hang.exists():
                hang_for_ever()
            yield batch

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


with kv.LoaderContext() as context:
    context.serve(Source(context.read(data["train"], 16, shuffle=64, seed=3)))
