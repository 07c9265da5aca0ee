"""Pages of the reference that list their names, in the order of importance, have all that are public."""

import re
from pathlib import Path
from types import ModuleType

import karvan as kv

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "karvan.md"


def test_the_page_of_karvan_has_all_public_names_with_the_trainer_first():
    listed = re.findall(r"^        - (\w+)$", PAGE.read_text(), re.MULTILINE)
    public = {name for name in kv.__all__ if not isinstance(getattr(kv, name), ModuleType)}
    assert listed[0] == "Trainer"
    assert sorted(listed) == sorted(public)
