"""Arrays of floats on disk in several formats: how near they come, how large they are, how fast they load."""
