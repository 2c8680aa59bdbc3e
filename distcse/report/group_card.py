"""The model cards of a mutual distillation: backbone, other groups, pairs and scores of each model."""

from __future__ import annotations

import yaml

from distcse import __version__
from distcse.experiments.mutual import Best, MutualResult
from distcse.files import write_text_atomic
from distcse.recipe import recipe_yaml
from distcse.report.card import base_model, scores_markdown
from distcse.storage import upload_dir

_USE_BI = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
_USE_CROSS = """from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
scores = model.predict([("A sentence.", "Another one.")])"""


def write_group_cards(result: MutualResult) -> None:
    """Write README.md (the card) and distcse/recipe.yaml into the folder of every best model."""
    for best in result.best:
        (best.model / "distcse").mkdir(exist_ok=True)
        write_text_atomic(best.model / "distcse" / "recipe.yaml", recipe_yaml(result.recipe))
        write_text_atomic(best.model / "README.md", group_card(result, best))
        upload_dir(best.model)


def group_card(result: MutualResult, best: Best) -> str:
    """Return a model's card as Markdown, with the hub's metadata in its front matter."""
    group = next(group for group in result.recipe.groups if group.name == best.group)
    cross = best.kind == "cross"
    kind = "cross-encoder" if cross else "bi-encoder"
    start = (group.cross_backbone or group.backbone) if cross else group.backbone
    tags = ["cross-encoder"] if cross else ["sentence-similarity", "feature-extraction"]
    metadata = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "text-ranking" if cross else "sentence-similarity",
        "tags": ["sentence-transformers", *tags, "distillation", "distcse", f"dataset_size:{result.pairs}"],
        **base_model(start),
    }
    dev = "" if best.dev is None else f" Its dev score there was {best.dev:.2f}."
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {result.recipe.name}: {best.group}, {kind}",
        f"A {kind}, initialized from `{start}` and trained on {result.pairs:,} unlabelled sentence pairs with Trans-Encoder's "
        f"distillation{_other_groups(result, best)}. This is the best checkpoint of cycle {best.phase.cycle}.{dev}",
        *(
            f"Group {name} was dropped during training ({why}); later labels do not include it."
            for name, why in result.dropped.items()
        ),
        _transductive(result),
        f"## Use\n\n```python\n{_USE_CROSS if cross else _USE_BI}\n```",
        scores_markdown(result.evaluation),
        "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`.",
        f"## Limits\n\nLicences of pairs and backbones apply to it. Made by distcse {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _other_groups(result: MutualResult, best: Best) -> str:
    others = [g.name for g in result.recipe.groups if g.name != best.group and g.name not in result.dropped]
    return f", together with {', '.join(others)}, with the groups' combined scores as labels" if others else ""


def _transductive(result: MutualResult) -> str:
    task = result.recipe.pairs.task
    if task is None:
        return ""
    return (
        f"**Transductive**: its pairs are those of the task `{task}`, including the test pairs (without their labels). Do not "
        "compare its scores on that task with those of models that were not trained on the test sentences."
    )
