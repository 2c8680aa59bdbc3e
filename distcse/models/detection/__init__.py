"""Replaced token detection (DiffCSE): edits of a sentence, and a discriminator that must find them."""

from distcse.models.detection.detector import EditDetector, build_detector
from distcse.models.detection.edits import Edited, Vocabulary, replace, replaced

__all__ = ["EditDetector", "Edited", "Vocabulary", "build_detector", "replace", "replaced"]
