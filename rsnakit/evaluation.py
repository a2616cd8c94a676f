"""What 05_evaluate reads: a run's out-of-fold scores with what the table says of them."""
