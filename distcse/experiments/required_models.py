"""Whether a recipe's models are there, and whether its settings fit them, before a run has a folder."""

from __future__ import annotations

from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id
from distcse.models import is_static
from distcse.models.folder import find_local_model, open_model
from distcse.models.loading import load_config, require_fit, resolve_pooling
from distcse.recipe import BaseRecipe, EncoderSection, TeacherSection
from distcse.recipe.encoders import TrainedSection
from distcse.teachers.kinds import kind_of


def require_models(recipe: BaseRecipe) -> None:
    """Check a recipe's models by their configurations, which are fetched from the hub where its cache lacks them.

    The weights are not read. The files of a hub's model are only looked at when it is loaded.

    Raises:
        ModelNotFoundError: A model is missing.
        EncoderSettingError: A setting of a student, teacher or group does not fit its model, or is required by it.
        PickledWeightsError: The weights of a local model are not safetensors.
        EncoderError: Another problem of a local model's files.
    """
    kinds = [kind_of(section, only_local=True) for section in recipe.inputs.teachers]
    teachers = [kind for kind in kinds if kind.is_model]
    for section in (*recipe.inputs.encoders, *(kind.section for kind in teachers if kind.has_vectors)):
        _require_model(section)
    for section in (kind.section for kind in teachers if not kind.has_vectors):
        _fetch_config(section)


def _require_model(section: EncoderSection) -> None:
    _fetch_config(section)
    if not isinstance(section, TrainedSection | TeacherSection):
        return  # only a part of the run needs it: the group of a cross-encoder may be dropped
    root = find_local_model(section.backbone, section.trust_remote_code, wanted=[CONFIG_FILE])
    if root is None or is_static(root):
        return
    if is_hub_id(section.backbone):
        if not section.trust_remote_code:  # the code may not be here yet
            require_fit(section, load_config(root))
        return
    folder = open_model(section.backbone, section.trust_remote_code)
    resolve_pooling(section, folder.layout)
    require_fit(section, folder.load_config())


def _fetch_config(section: EncoderSection) -> None:
    if is_hub_id(section.backbone) and find_local_model(section.backbone, wanted=[CONFIG_FILE]) is None:
        fetch_from_hub(section.backbone, [CONFIG_FILE], only_local=False)
