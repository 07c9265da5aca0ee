"""`few_examples`: the settings of tests whose random examples are expensive."""

from typing import Any


def few_examples(few: int, thorough: int | None = None, **more: Any) -> Any:
    """Only `few` examples; with `--thorough` that many, or as many as all other tests have."""
    from hypothesis import settings

    usual = settings.default.max_examples
    return settings(max_examples=few if usual <= 12 else thorough or usual, **more)
