"""Owns a folder until its input ends: `python owner_program.py FOLDER`. Says "owned", or the error."""

import logging
import sys

from karvan.owner import OwnerError, own

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        owner = own(sys.argv[1])
    except OwnerError as error:
        print(f"refused: {error}", flush=True)
        sys.exit(2)
    print("owned", flush=True)
    for _ in sys.stdin:
        try:
            owner.check()
            print("mine", flush=True)
        except OwnerError as error:
            print(f"lost: {error}", flush=True)
    owner.release()
