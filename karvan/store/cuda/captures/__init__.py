"""Captures: tables on a device as they were at one moment, copied to the host while training continues."""
