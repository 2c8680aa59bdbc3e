"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the workers' clients of these servers.

Nothing is imported here, so that servers of cached tables start without PyTorch.
"""
