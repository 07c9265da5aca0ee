"""Griffe, which reads docstrings for the documentation, knows `Examples:` but not Google's `Example:`."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Show `Example:` of a docstring as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples: Example\n")
