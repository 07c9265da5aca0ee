"""Loads a checkpoint into a job's model and the transform of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from karvan.cli.errors import CommandError

if TYPE_CHECKING:
    import karvan as kv


def restore(job: kv.TrainingJob, path: str | None) -> kv.checkpoint.Checkpoint:
    """Load a checkpoint, or the newest one of a run's folder; without a path, of the job's own run."""
    from karvan.checkpoint import CheckpointError, find
    from karvan.train.dataset import Transforms

    folder = path if path is not None else job.trainer.saver.folder
    if folder is None:
        raise CommandError("The job has no folder of checkpoints: name the one to load with --checkpoint.")
    checkpoint = find(folder)
    state = checkpoint.load(job.trainer.model)
    if "model" not in state:
        raise CheckpointError.mismatch(
            checkpoint.path, "a model, as a Trainer saves it", ", ".join(state) or "nothing"
        )
    try:
        job.trainer.model.load_state_dict(state["model"])
    except RuntimeError as error:  # torch's text has a line for each tensor; the first ones are enough
        lines = [line.strip() for line in str(error).splitlines()[1:3]]
        raise CheckpointError(
            checkpoint.path, f"its model is another than the job's: {' '.join(lines)}"
        ) from error
    _restore_transform(job.eval_data, checkpoint, state)
    Transforms(job.eval_data).require_columns(state)
    return checkpoint


def _restore_transform(data: Any, checkpoint: kv.checkpoint.Checkpoint, state: Mapping[str, Any]) -> None:
    from karvan.checkpoint.checkpoint import KEY, has_state, load_transforms, name_of

    transform = getattr(data, "transform", None)
    unfitted = getattr(transform, "unfitted", ())
    if has_state(transform) and (unfitted or name_of(transform) in state.get(KEY, {})):
        load_transforms(checkpoint.path, state, transform)
