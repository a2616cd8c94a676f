"""Scores on disk as they come, so that a restarted inference goes on where the last one was killed."""
