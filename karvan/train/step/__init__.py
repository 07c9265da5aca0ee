"""One optimizer step: precision, devices, accumulation, schedules."""
