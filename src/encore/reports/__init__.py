"""A step as tables, JSON, a page, a picture and a snapshot, from plain numbers and names that `compiler/summary.py`
computes. No decisions, no graphs, no tensors."""
