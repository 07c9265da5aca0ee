"""When a fit ends: its goal, signals, requests to stop."""
