"""The packaged search spaces."""
