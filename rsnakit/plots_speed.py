"""Figures of speed and memory."""
