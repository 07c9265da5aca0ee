"""Programs written for RecIS, PERSIA and ElasticDL: adapters of their names to Karvan's.

`karvan run --as recis program.py` runs such a program as it is: its imports find the adapters. They can be
imported directly, too: `from karvan.compat import recis`. An adapter has no numerics, sockets or files of its
own; what Karvan has no counterpart for is an error that says so. See docs/migrating.md.

Most modules of the systems are in tables, one for each system: see `imports.py`.
"""

from karvan.compat.imports import find_by_tables

find_by_tables()
