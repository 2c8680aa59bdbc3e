"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the worker's client of them.

Nothing is named here: whoever serves a table does not import PyTorch for it.
"""
