"""The program of a worker, in a process of a job: a command with its flags, or that of --job_command."""

import os
import sys
from pathlib import Path

if __name__ == "__main__" and sys.argv[1] in ("program", "module"):
    import karvan
    from karvan.compat.programs import run_program
    from karvan.job.environment import JobEnvironment

    if sys.argv[1] == "module":
        sys.path.insert(0, str(Path.cwd()))  # as python -m does
    os.environ.setdefault("WORKER_ID", str(JobEnvironment.read().index))
    karvan.connect("sharded")
    run_program("elasticdl", Path(sys.argv[2]), sys.argv[3:])
elif __name__ == "__main__":
    from karvan.compat.cuda_fallback import cuda_fallback
    from karvan.compat.elasticdl.commands import work
    from karvan.compat.imports import SYSTEMS, import_aliases

    with import_aliases(SYSTEMS["elasticdl"]), cuda_fallback():
        work(sys.argv[1:])
