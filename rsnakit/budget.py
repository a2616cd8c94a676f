"""A clock over the images that are left: what still fits, and what to drop when not all does."""
