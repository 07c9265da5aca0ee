"""The program of a worker: a command with its flags, in a process of a job."""

import sys

if __name__ == "__main__":
    from karvan.compat.cuda_fallback import cuda_fallback
    from karvan.compat.elasticdl.commands import work
    from karvan.compat.import_aliases import import_aliases
    from karvan.compat.programs import SYSTEMS

    with import_aliases(SYSTEMS["elasticdl"]), cuda_fallback():
        work(sys.argv[1:])
