"""chaos_program.py, which blocks in a step while there is a note `block`, before its fit while `dawdle`."""

import runpy
import sys
import time
from pathlib import Path

import karvan as kv

notes = Path(sys.argv[2])


def block_for_ever():
    while (notes / "block").exists():
        time.sleep(0.01)


class Blocking(kv.Trainer):
    def __init__(self, *args, callbacks, **options):
        super().__init__(*args, callbacks=[*callbacks, Block()], **options)

    def fit(self, *args, **options):
        while (notes / "dawdle").exists():
            (notes / "dawdling").touch()
            time.sleep(0.01)
        return super().fit(*args, **options)


class Block(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        if (notes / "block").exists():
            block_for_ever()


kv.Trainer = Blocking
runpy.run_path(str(Path(__file__).parent / "chaos_program.py"), run_name="__main__")
