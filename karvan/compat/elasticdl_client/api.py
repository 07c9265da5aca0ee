"""An error for each command: it says what to run."""

from karvan.compat.unsupported import missing_names

__getattr__ = missing_names(
    "elasticdl_client.api",
    {
        name: f"run it: karvan run --as elasticdl {' '.join(reversed(name.split('_')))}."
        for name in ("train", "evaluate", "predict", "init_zoo", "build_zoo", "push_zoo")
    },
)
