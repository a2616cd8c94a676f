"""Where in an image a score comes from."""
