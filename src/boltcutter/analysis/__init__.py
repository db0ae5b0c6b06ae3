"""Runs that are there: a table of them, a query language, labels, and a page."""
