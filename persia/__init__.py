"""`import persia` in a plain Python process: Karvan's adapter, as in `karvan run --as persia program.py`.

So lines of a Procfile such as `python3 data_loader.py` and `python -m persia.launcher` run as they are.
"""

from karvan.compat.imports import add_alias

add_alias("persia", "karvan.compat.persia")
