"""Which device, and copies of a batch's columns to it."""

from karvan.devices.choice import check_device, data_device, exact_device, require_cpu_batches
from karvan.devices.column_copies import (
    Check,
    ColumnCopies,
    CopiedBatch,
    CopyInFlight,
    allocations_of,
    copy_columns,
    hold_memory,
    hold_until_used,
    tensors_of,
)

__all__ = [
    "Check",
    "ColumnCopies",
    "CopiedBatch",
    "CopyInFlight",
    "allocations_of",
    "check_device",
    "copy_columns",
    "data_device",
    "exact_device",
    "hold_memory",
    "hold_until_used",
    "require_cpu_batches",
    "tensors_of",
]
