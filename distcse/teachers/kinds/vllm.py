"""Bi-encoder that vLLM computes (Kwon et al. 2023), for decoder models as teachers: `engine: vllm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.checks import Check, fail
from distcse.devices.device import default_device, gpu_module, has_gpu
from distcse.errors import EncoderError, MissingDependencyError, UnsuitableTeacherError
from distcse.model_source import resolve_model
from distcse.models import TokenizerSpec, is_cross_encoder
from distcse.models.files import check_weights
from distcse.models.folder import ModelFolder, find_local_model
from distcse.models.loading import resolve_pooling
from distcse.recipe import Role, TeacherSection
from distcse.storage import content_key
from distcse.teachers.kinds.base import ModelKind, register_kind
from distcse.teachers.teacher import Embedder

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_POOLINGS = {"cls": "CLS", "mean": "MEAN", "last_token": "LAST"}
_MEMORY_PART = 0.9
"""Part of a GPU's free memory that vLLM may take, as it takes of all memory by default."""
_TEXTS = 4096
"""Texts between two reports of progress."""


@register_kind
class VllmKind(ModelKind):
    """A bi-encoder's folder, computed by vLLM. Its process starts vLLM's engine, which needs GPUs or a CPU build of vLLM."""

    name = "bi-encoder"

    @property
    def overflows_fp16(self) -> bool:
        """True: vLLM computes all of the model in the precision, also norms and embeddings."""
        return True

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        return section.engine == "vllm" and section.loads_model

    def source_fingerprint(self) -> str:
        """Hash the model's files, for tables of vLLM's own: its half precision rounds at other places."""
        return content_key([super().source_fingerprint(), "vllm"])

    def check_settings(self) -> None:
        """Check that vLLM is there and computes such a model, if the model is here.

        Raises:
            MissingDependencyError: vLLM is not installed.
            UnsuitableTeacherError: The model has a pooling, or modules after it, that are not passed on to vLLM.
            EncoderError: The folder is damaged.
        """
        super().check_settings()
        if find_spec("vllm") is None:
            raise MissingDependencyError(
                f"teacher {self.section.backbone} has engine: vllm, which is not installed; pip install vllm, or write "
                "engine: torch"
            )
        root = find_local_model(self.section.backbone, self.section.trust_remote_code)
        if root is None:
            return
        layout = ModelFolder.read(root, self.section.trust_remote_code).layout
        pooling = resolve_pooling(self.section, layout)
        if is_cross_encoder(root) or pooling not in _POOLINGS or layout.head or layout.truncate_dim:
            raise UnsuitableTeacherError(
                f"teacher {self.section.backbone}: engine vllm computes bi-encoders with pooling {', '.join(_POOLINGS)} and no "
                "module after it but a normalization; write engine: torch"
            )

    def check_source(self) -> list[Check]:
        """Check, for the doctor, what `check_settings` refuses."""
        try:
            self.check_settings()
        except (MissingDependencyError, UnsuitableTeacherError, EncoderError) as error:
            return [fail("teacher", str(error), "or use another teacher")]
        return []

    def open_embedder(self) -> Embedder:
        """Start vLLM's engine with the model, in the teacher's precision."""
        section = self.section
        root = resolve_model(section.backbone, section.trust_remote_code)
        self.check_settings()  # the folder may be new, and a node's packages may differ
        check_weights(root)
        from vllm import LLM  # takes seconds
        from vllm.config import PoolerConfig

        folder, tokens = ModelFolder.read(root, section.trust_remote_code), TokenizerSpec.of(section)
        settings: dict[str, Any] = {}
        if has_gpu():
            gpu = gpu_module(default_device())
            free, total = gpu.mem_get_info()
            share = gpu.get_per_process_memory_fraction()  # that of the process on the cluster: see `limit_memory`
            settings["gpu_memory_utilization"] = min(share, _MEMORY_PART * free / total)
        engine = LLM(
            str(folder.backbone),
            runner="pooling",
            dtype=_DTYPES[self.precision],
            max_model_len=max(reading.max_length for reading in tokens.readings.values()),
            pooler_config=PoolerConfig(
                seq_pooling_type=_POOLINGS[resolve_pooling(section, folder.layout)], use_activation=True
            ),
            trust_remote_code=section.trust_remote_code,
            **settings,
        )
        return VllmEncoder(engine, tokens)


class VllmEncoder:
    """Embeds texts with an engine of vLLM, with the tokens that distcse's own encoder has.

    Args:
        engine: The engine, in the teacher's precision.
        tokens: The model's tokenizer, and how each role is read.
    """

    def __init__(self, engine: Any, tokens: TokenizerSpec) -> None:
        self._engine, self._tokens = engine, tokens

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role = "text",
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Embed n texts; return (n, d) float32 unit vectors.

        Args:
            texts: The texts.
            role: What they are to a search.
            batch_tokens: Not used: vLLM composes its batches.
            normalize: Not used: all have unit length.
            precision: Not used: it is the engine's.
            on_progress: Called with the number of texts embedded so far.
        """
        parts = [np.empty((0, 0), dtype=np.float32)]
        for begin in range(0, len(texts), _TEXTS):
            ids = self._tokens.token_ids(texts[begin : begin + _TEXTS], role)
            found = self._engine.embed([{"prompt_token_ids": row} for row in ids], use_tqdm=False)
            parts.append(np.array([each.outputs.embedding for each in found], dtype=np.float32))
            if on_progress is not None:
                on_progress(begin + len(ids))
        return np.concatenate(parts[1:] or parts)
