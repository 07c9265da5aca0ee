"""Who may talk to a service: tokens, TLS certificates, and who listens at a port."""
