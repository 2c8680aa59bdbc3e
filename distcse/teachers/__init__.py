"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the worker's client of them.

Nothing is named here: whoever serves cosines of a table does not import PyTorch for it.
"""
