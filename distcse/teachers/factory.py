"""Creates teachers from a recipe: embedders of a corpus, and live teachers."""

from __future__ import annotations

from pathlib import Path

from distcse.data import Corpus
from distcse.device import default_device
from distcse.errors import UnsuitableTeacherError
from distcse.files import text_checksum
from distcse.models import CrossEncoder, Encoder, is_cross_encoder, model_fingerprint, resolve_model
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.models.precision import frozen_weight_dtype
from distcse.models.prompts import is_template
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.custom import custom_fingerprint, open_custom
from distcse.teachers.endpoint import Endpoint
from distcse.teachers.pair_teacher import PairTeacher
from distcse.teachers.teacher import Embedder, LiveTeacher, Teacher


def open_embedder(teacher: TeacherSection) -> Embedder:
    """Create a teacher that outputs vectors: an encoder on the default device, an endpoint, or a custom teacher.

    Pass the recipe's precision to an encoder's `encode`: its weights are loaded in that precision.

    Raises:
        CustomClassError: The class of a custom teacher cannot be imported or created, or lacks a method.
        EncoderError: The encoder's model cannot be loaded.
    """
    if teacher.class_path is not None:
        return open_custom(teacher)
    if teacher.endpoint is not None:
        return Endpoint(teacher.backbone, teacher.endpoint, teacher.prompt)
    device = default_device()
    encoder = Encoder.from_section(teacher, frozen_weight_dtype(teacher.forward_precision, device)).to(device).eval()
    use_mkldnn_linear(encoder, teacher.forward_precision)
    return encoder


def scores_pairs(teacher: TeacherSection) -> bool:
    """Return whether a teacher is a cross-encoder, which has neither vectors nor a table."""
    return teacher.is_model and is_cross_encoder(resolve_model(teacher.backbone, teacher.trust_remote_code))


def uses_table(section: TeachersSection, teacher: TeacherSection) -> bool:
    """Return whether a teacher's lists are served from a table. `auto` uses one, as a corpus's vectors never change."""
    return section.mode in ("auto", "table") and not scores_pairs(teacher)


def fingerprint(teacher: TeacherSection) -> str:
    """Hash what determines a teacher's vectors: model files, URL and model of an endpoint, or a custom class's fingerprint."""
    if teacher.class_path is not None:
        return custom_fingerprint(teacher)
    if teacher.endpoint is not None:
        named = f"{teacher.endpoint.url}\0{teacher.backbone}"
        # Old tables embedded the literal text of a template.
        return text_checksum(f"{named}\0filled in" if is_template(teacher.prompt) else named)
    return model_fingerprint(resolve_model(teacher.backbone, teacher.trust_remote_code))


def live_at(teacher: TeacherSection, corpus: Path, tokens_per_batch: int) -> Teacher:
    """Create a live teacher of the prepared corpus in folder `corpus`; see `live`."""
    return live(teacher, Corpus.open(corpus), tokens_per_batch)


def live(teacher: TeacherSection, corpus: Corpus, tokens_per_batch: int) -> Teacher:
    """Create a teacher that computes every list with its model, without a table.

    Args:
        teacher: The teacher's section of the recipe.
        corpus: The corpus whose row ids will be requested.
        tokens_per_batch: Maximum number of tokens in a forward pass.

    Raises:
        UnsuitableTeacherError: A cross-encoder is configured with `similarity: rank` or a prompt.
    """
    if scores_pairs(teacher):
        if teacher.similarity == "rank":
            raise UnsuitableTeacherError(
                f"teacher {teacher.backbone} is a cross-encoder, which has no vectors for a rank space; write similarity: cosine"
            )
        if teacher.prompt:
            raise UnsuitableTeacherError(
                f"teacher {teacher.backbone} is a cross-encoder, which reads pairs without a prompt; remove prompt"
            )
        scorer = CrossEncoder.load(teacher.backbone, teacher.max_length, teacher.trust_remote_code)
        use_mkldnn_linear(scorer.to(default_device()).eval(), teacher.forward_precision)
        return PairTeacher(scorer, corpus, teacher.forward_precision, tokens_per_batch)
    return LiveTeacher(open_embedder(teacher), corpus, teacher.forward_precision, tokens_per_batch)
