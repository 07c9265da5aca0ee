"""Looking at runs: their history, and a page that plots it."""
