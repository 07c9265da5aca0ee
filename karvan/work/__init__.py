"""Leased work: tasks of a data set, the ledger of who holds which, and the calls about them."""
