"""Error messages for unknown names: what exists, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def listed(name: object, known: Iterable[object]) -> str:
    """The known names in a sentence's end, and the nearest one: "user, item. Did you mean 'item'?"."""
    import difflib  # only errors need it

    names = [str(each) for each in known]
    nearest = difflib.get_close_matches(str(name), names, n=1)
    meant = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return f"{', '.join(names) or 'nothing'}.{meant}"
