"""Which checkpoint a fit continues from: `resume` of `Trainer.fit`.

A name is a choice for the start of a job. Trainers that a launcher or torchrun has restarted continue from
the newest checkpoint instead: going back to the chosen one with every restart would lose what was trained
since.
"""

from __future__ import annotations

import os

from karvan.checkpoint.recovery import check_resume
from karvan.job.checkpoint_url import shown
from karvan.job.environment import JobEnvironment
from karvan.train.state.saving import NoSaver


def check_choice(saver: NoSaver, resume: bool | str) -> None:
    """Raise if checkpoints are refused but exist, or if one is requested but there is no folder."""
    check_resume(resume)
    if isinstance(resume, str) and saver.folder is None:
        raise ValueError(f"resume expects a Trainer with checkpoints, got {resume!r} and a Trainer without.")
    newest = None if resume else saver.newest_step()
    if newest is not None:
        raise ValueError(
            f"resume is False, but {shown(saver.folder)} has checkpoints up to step {newest}: "
            "expected a folder without, or resume=True."
        )


def chosen(resume: bool | str) -> str | None:
    """The name of the checkpoint to use; None for the newest."""
    by_torchrun = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") not in ("", "0")
    restarted = by_torchrun or JobEnvironment.read().generation > 0
    return resume if isinstance(resume, str) and not restarted else None
