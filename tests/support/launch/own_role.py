"""A role of its own in the table, which has to have it before modules that read it are imported."""

from karvan.job.roles import Role, add_role

ADDER = add_role(Role("adder", start=15, factory="own_role_program:make", spreads=True))
