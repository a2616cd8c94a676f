"""What gives the label away, or stands on both sides: looked for before training and evaluation."""
