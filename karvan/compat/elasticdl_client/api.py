"""An error for each command: it says what to run."""

from karvan.compat.unsupported import missing_names

__getattr__ = missing_names(
    "elasticdl_client.api",
    {
        **{name: f"run it: karvan run --as elasticdl {name}." for name in ("train", "evaluate", "predict")},
        **dict.fromkeys(
            ("init_zoo", "build_zoo", "push_zoo"),
            "commands take a folder of models as it is, --model_zoo; docker build makes an image of it.",
        ),
    },
)
