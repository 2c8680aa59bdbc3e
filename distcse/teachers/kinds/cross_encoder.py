"""Cross-encoder as a teacher. It reads both sentences of a pair together, so lists are scored on request, and candidates once."""

from __future__ import annotations

from collections.abc import Mapping

from distcse.checks import Check, fail
from distcse.devices.device import default_device
from distcse.errors import EncoderError, UnsuitableTeacherError
from distcse.models import CrossEncoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.cross import check_scorer
from distcse.models.folder import ModelFolder, find_local_model
from distcse.teachers.kinds.base import ModelKind, PairKind
from distcse.teachers.teacher import PairScorer


class CrossEncoderKind(PairKind, ModelKind):
    """A cross-encoder's model folder."""

    name = "cross-encoder"

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {"pooling": "a cross-encoder has no vectors"}

    def check_source(self) -> list[Check]:
        """Check, for the doctor, what `check_settings` and `check_scorer` refuse in a folder that is here."""
        section = self.section
        try:
            self.check_settings()
            folder = find_local_model(section.backbone, section.trust_remote_code)
            if folder is not None:
                check_scorer(ModelFolder.read(folder, section.trust_remote_code))
        except (UnsuitableTeacherError, EncoderError) as error:
            return [fail("teacher", str(error), "or use another teacher")]
        return []

    def open_scorer(self) -> PairScorer:
        """Load the cross-encoder."""
        section = self.section
        scorer = CrossEncoder.load(section.backbone, section.longest, section.trust_remote_code)
        use_mkldnn_linear(scorer.to(default_device()).eval(), self.precision)
        return scorer
