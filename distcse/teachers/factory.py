"""Teachers from a recipe: what embeds a corpus, and what answers live."""

from __future__ import annotations

from pathlib import Path

from distcse.data import Corpus
from distcse.device import default_device
from distcse.errors import UnsuitableTeacherError
from distcse.files import text_checksum
from distcse.models import CrossEncoder, Encoder, is_cross_encoder, model_fingerprint, resolve_model
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.models.precision import held_as
from distcse.models.prompts import is_template
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.custom import custom_fingerprint, open_custom
from distcse.teachers.endpoint import Endpoint
from distcse.teachers.pair_teacher import PairTeacher
from distcse.teachers.teacher import Embedder, LiveTeacher, Teacher


def open_embedder(teacher: TeacherSection) -> Embedder:
    """A teacher that gives vectors: an encoder on the best device here, an endpoint, or one of the user's own.

    An encoder is to be asked in the recipe's precision, in which its weights are held.
    """
    if teacher.class_path is not None:
        return open_custom(teacher)
    if teacher.endpoint is not None:
        return Endpoint(teacher.backbone, teacher.endpoint, teacher.prompt)
    device = default_device()
    encoder = Encoder.from_section(teacher, held_as(teacher.forward_precision, device)).to(device).eval()
    use_mkldnn_linear(encoder, teacher.forward_precision)
    return encoder


def scores_pairs(teacher: TeacherSection) -> bool:
    """Whether a teacher is a cross-encoder, which has no vectors and no table."""
    return teacher.is_model and is_cross_encoder(resolve_model(teacher.backbone, teacher.trust_remote_code))


def uses_table(section: TeachersSection, teacher: TeacherSection) -> bool:
    """`auto` takes the table: a corpus's rows are fixed, so their vectors never change."""
    return section.mode in ("auto", "table") and not scores_pairs(teacher)


def fingerprint(teacher: TeacherSection) -> str:
    """What decides a teacher's vectors: a model's files, an endpoint's address and model name, or what code says of itself."""
    if teacher.class_path is not None:
        return custom_fingerprint(teacher)
    if teacher.endpoint is not None:
        named = f"{teacher.endpoint.url}\0{teacher.backbone}"
        # Tables from before templates were filled in are of other texts.
        return text_checksum(f"{named}\0filled in" if is_template(teacher.prompt) else named)
    return model_fingerprint(resolve_model(teacher.backbone, teacher.trust_remote_code))


def live_at(teacher: TeacherSection, corpus: Path, tokens_per_batch: int) -> Teacher:
    """`live`, of a corpus in a folder."""
    return live(teacher, Corpus.open(corpus), tokens_per_batch)


def live(teacher: TeacherSection, corpus: Corpus, tokens_per_batch: int) -> Teacher:
    """What runs a teacher for every list."""
    if scores_pairs(teacher):
        if teacher.similarity == "rank":
            raise UnsuitableTeacherError(
                f"teacher {teacher.backbone} is a cross-encoder: it has no vectors, so no rank space"
            )
        if teacher.prompt:
            raise UnsuitableTeacherError(
                f"teacher {teacher.backbone} is a cross-encoder, which reads pairs without a prompt; take it away"
            )
        scorer = CrossEncoder.load(teacher.backbone, teacher.max_length, teacher.trust_remote_code)
        use_mkldnn_linear(scorer.to(default_device()).eval(), teacher.forward_precision)
        return PairTeacher(scorer, corpus, teacher.forward_precision, tokens_per_batch)
    return LiveTeacher(open_embedder(teacher), corpus, teacher.forward_precision, tokens_per_batch)
