"""Who owns which key, and what travels between those who ask and those who own."""
