"""Helpers that RecIS programs import."""
