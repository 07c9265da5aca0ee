"""Access to services: tokens, TLS certificates, and checks of who listens at a port."""
