"""Whether a recipe's models are there, and whether its settings fit them, before a run has a folder."""

from __future__ import annotations

from pathlib import Path

from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id
from distcse.models import is_static, resolve_model
from distcse.models.folder import ModelFolder, find_local_model, open_model
from distcse.models.loading import require_fit, resolve_pooling
from distcse.recipe import BaseRecipe, EncoderSection, TeacherSection
from distcse.recipe.encoders import TrainedSection
from distcse.storage import is_uri
from distcse.teachers.kinds import kind_of


def require_models(recipe: BaseRecipe) -> None:
    """Check a recipe's models by their configurations, which are fetched from the hub where its cache lacks them.

    The weights are not read. Of a model on the hub, only the configuration is looked at; models in object storage, and those
    that only start a cross-encoder or a generator, are not.

    Raises:
        ModelNotFoundError: A model is missing.
        EncoderSettingError: A setting of a student, teacher or group does not fit its model, or is required by it.
        PickledWeightsError: The weights of a local model are not safetensors.
        EncoderError: Another problem of a local model's files.
    """
    inputs = recipe.inputs
    teachers = [teacher for teacher in inputs.teachers if kind_of(teacher, only_local=True).is_model]
    for section in (*inputs.encoders, *teachers):
        if is_hub_id(section.backbone) and _find_config(section) is None:
            fetch_from_hub(section.backbone, [CONFIG_FILE], only_local=False)
    trained = [section for section in inputs.encoders if isinstance(section, TrainedSection)]
    # A model on the hub is known as a cross-encoder by its configuration.
    embedding = [teacher for teacher in teachers if kind_of(teacher, only_local=True).has_vectors]
    pooled: list[TrainedSection | TeacherSection] = [*trained, *embedding]
    for section in pooled:
        if is_hub_id(section.backbone):
            _require_hub_model(section)
        elif not is_uri(section.backbone):
            _require_local_model(section)


def _require_hub_model(section: EncoderSection) -> None:
    root = _find_config(section)
    if root is not None and not is_static(root) and not section.trust_remote_code:  # its code may not be here yet
        require_fit(section, ModelFolder.read(root).load_config())


def _require_local_model(section: TrainedSection | TeacherSection) -> None:
    if is_static(resolve_model(section.backbone)):
        return
    folder = open_model(section.backbone, section.trust_remote_code)
    resolve_pooling(section, folder.layout)
    require_fit(section, folder.load_config())


def _find_config(section: EncoderSection) -> Path | None:
    return find_local_model(section.backbone, wanted=[CONFIG_FILE])
