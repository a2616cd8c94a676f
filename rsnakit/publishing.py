"""The bundle to Kaggle by its own client, and what the client says, in plain sentences."""
