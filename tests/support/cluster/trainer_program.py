"""A trainer for tests: takes batches, notes them in a file, and saves its place every few batches.

`python trainer_program.py FILE LOADERS`; a line of FILE is a batch, and one with `saved` says that all before
it are in the state that lies beside the file.
"""

import json
import sys
import time
from pathlib import Path

import karvan as kv


def main(path, loaders):
    path = Path(path)
    state = path.with_suffix(".state")
    data = kv.data.from_loaders(loaders=int(loaders), rank=0, world_size=1)
    if state.exists():
        data.load_state_dict(json.loads(state.read_text()))
    with path.open("a") as file:
        for taken, batch in enumerate(data, 1):
            print(batch.number, *batch["id"].tolist(), file=file, flush=True)
            if taken % 4 == 0:
                aside = path.with_suffix(".aside")
                aside.write_text(json.dumps(data.state_dict()))
                aside.rename(state)
                print("saved", file=file, flush=True)
            time.sleep(0.02)  # so that there is a middle to be killed in
        print("end", file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
