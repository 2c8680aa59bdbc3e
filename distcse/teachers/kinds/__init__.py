"""The kinds of teachers, one file a kind. Importing this package imports every file in it, and thereby registers the kinds.

To add a kind, see CONTRIBUTING.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from distcse.models import is_causal_reranker, is_cross_encoder, resolve_model
from distcse.models.folder import find_local_model
from distcse.recipe import TeacherSection
from distcse.storage import ArtifactStore
from distcse.teachers.kinds import base
from distcse.teachers.kinds.base import BiEncoderKind, ListSource, TeacherKind, register_kind
from distcse.teachers.kinds.causal_reranker import CausalRerankerKind
from distcse.teachers.kinds.cross_encoder import CrossEncoderKind
from distcse.teachers.teacher import Teacher
from distcse.text import Corpus

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ListSource", "TeacherKind", "kind_of", "open_live", "register_kind"]


def kind_of(section: TeacherSection, only_local: bool = False) -> TeacherKind:
    """Create the teacher that a section of the recipe selects: a registered kind, or else what its model is.

    No model is loaded. A model's modules.json and the architecture in its config.json tell what it is.
    """
    registered = next((kind for kind in base.TEACHER_KINDS if kind.matches(section)), None)
    if registered is not None:
        return registered(section)
    folder = find_local_model(
        section.backbone, section.trust_remote_code
    )  # a model in the hub's cache is not requested from the hub again
    if folder is None and not only_local:
        folder = resolve_model(section.backbone, section.trust_remote_code)
    if folder is not None and is_causal_reranker(folder):
        return CausalRerankerKind(section)
    return CrossEncoderKind(section) if folder is not None and is_cross_encoder(folder) else BiEncoderKind(section)


def open_live(section: TeacherSection, corpus: ArtifactStore, tokens_per_batch: int | None) -> Teacher:
    """Create a live teacher of the prepared corpus in `corpus`; see `TeacherKind.open_live`."""
    return kind_of(section).open_live(Corpus.open(corpus), tokens_per_batch)
