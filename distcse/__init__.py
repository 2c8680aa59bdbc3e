"""distcse: distributed distillation of sentence encoders on Ray."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("distcse")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"
