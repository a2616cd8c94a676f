"""A command in a place of its own: no network, inputs that cannot be written to, and nothing of this repository."""
