"""Titles, ids and slugs of data sets and notebooks, checked as Kaggle's client checks them."""
