"""Access to services: tokens and TLS certificates."""
