"""The cards of a mutual distillation's models: what each began as, whom it learned with, on which pairs, what was measured."""

from __future__ import annotations

import yaml

from distcse import __version__
from distcse.experiments.mutual import Best, MutualResult
from distcse.files import write_text_atomic
from distcse.recipe import recipe_yaml
from distcse.report.card import base_model, scores_told
from distcse.storage import upload_dir

_USE_BI = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
_USE_CROSS = """from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
scores = model.predict([("A sentence.", "Another one.")])"""


def write_group_cards(result: MutualResult) -> None:
    """Put README.md (the card) and distcse/recipe.yaml beside every model that was chosen."""
    for best in result.best:
        (best.model / "distcse").mkdir(exist_ok=True)
        write_text_atomic(best.model / "distcse" / "recipe.yaml", recipe_yaml(result.recipe))
        write_text_atomic(best.model / "README.md", group_card(result, best))
        upload_dir(best.model)


def group_card(result: MutualResult, best: Best) -> str:
    """Markdown with the hub's metadata in its front matter."""
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
        f"A {kind} that began as `{start}` and learned from {result.pairs:,} sentence pairs without labels, by Trans-Encoder's "
        f"distillation{_company(result, best)}. This is the best of cycle {best.phase.cycle}.{dev}",
        *(
            f"Group {name} was dropped on the way ({why}); labels after that are without it."
            for name, why in result.dropped.items()
        ),
        _transductive(result),
        f"## Use\n\n```python\n{_USE_CROSS if cross else _USE_BI}\n```",
        scores_told(result.evaluation),
        "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`.",
        f"## Limits\n\nLicences of pairs and backbones apply to it. Made by distcse {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _company(result: MutualResult, best: Best) -> str:
    others = [g.name for g in result.recipe.groups if g.name != best.group and g.name not in result.dropped]
    return f", together with {', '.join(others)}: all learned from what they scored together" if others else ""


def _transductive(result: MutualResult) -> str:
    task = result.recipe.pairs.task
    if task is None:
        return ""
    return (
        f"**Transductive**: its pairs are those of the task `{task}`, test pairs among them (without their labels). Its figures "
        "on that task are not to be compared with those of models that never saw the test sentences."
    )
