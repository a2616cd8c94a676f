"""Scores within sites, machines, views, ages and the like."""
