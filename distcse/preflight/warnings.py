"""Settings that work and probably do not do what is meant: reported by run, sweep, `--dry-run`, plan and doctor.

docs/reference/troubleshooting.md lists the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcse.events import LogMessage, Reporter
from distcse.model_source import CONFIG_FILE
from distcse.models import resolve_model
from distcse.models.folder import ModelFolder, find_local_model
from distcse.models.loading import has_dropout
from distcse.models.st_format import UNNAMED_PROMPTS, backbone_folder, read_model_file
from distcse.recipe import BaseRecipe, DetectionSection, EncoderSection, Recipe
from distcse.recipe.section import settings_without_effect
from distcse.recipe.training import TrainingSection
from distcse.storage import is_in_session, resolve_path, shadowed_package
from distcse.teachers.table import VectorStatistics, effective_weights

_SETTINGS_FILES = [
    "config.json",
    "*/config.json",
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
]
"""Files of a model on the hub that are read here."""
_NARROW = 0.5
"""Spread of a teacher's cosines, relative to the widest one's, below which its band counts as narrow."""
_FEWEST_STEPS = 100
"""Steps of the shortest runs in docs/explanation/students.md that end within 0.5 of longer ones."""
_MOST_CUT = 0.37
"""Share of cut rows of the text of all students there: Wikipedia's sentences at 32 tokens."""
_MOST_UNKNOWN = 0.05
"""Share of unknown tokens. BERT's tokenizer has 0.003 % in 2,000 sentences of the English Wikipedia, and 95 % in Chinese."""
_LAST_PART = 0.25
"""Last part of the steps in which the dev score of a run that is long enough hardly rises."""
_NOISE = 0.35
"""Largest standard deviation of a dev score over seeds there; a smaller rise may be chance."""


@dataclass(frozen=True)
class SettingsWarning:
    """A warning of a recipe's settings."""

    code: str
    """Stable code, `DCSE-W…`."""
    problem: str
    """The setting, and what it leads to."""
    fix: str
    """How to fix it, as an imperative."""

    @property
    def text(self) -> str:
        """The warning as one line."""
        return f"[{self.code}] {self.problem}; {self.fix}"


def report_warnings(warnings: Sequence[SettingsWarning], reporter: Reporter) -> None:
    """Report warnings to a run's caller, one line each."""
    for warning in warnings:
        reporter.emit(LogMessage(warning.text, warning=True))


def warn_of_places(recipe: BaseRecipe) -> list[SettingsWarning]:
    """Warn of storage in the folder of a Ray session, and of a job's copy of distcse that hides the installed one."""
    found = [
        SettingsWarning(
            "DCSE-W03",
            f"storage.{key} is {folder}, in the folder of a Ray session, which is deleted with the cluster",
            f"write storage.{key}=/shared/{key}, or storage.{key}=s3://BUCKET/{key}",
        )
        for key in ("runs", "cache")
        if is_in_session(folder := resolve_path(getattr(recipe.storage, key)).absolute())
    ]
    if (shadowed := shadowed_package()) is not None:
        used, installed = shadowed
        found.append(
            SettingsWarning(
                "DCSE-W12",
                f"this job runs {used}, uploaded with its working directory, and not the installed {installed}",
                "submit the job from a folder without the package, or install what you upload",
            )
        )
    return found


def warn_of_unread_keys(recipe: BaseRecipe, unread: Mapping[str, str]) -> list[SettingsWarning]:
    """Warn of settings that nothing reads: `unread` has their paths -> why."""
    return [SettingsWarning("DCSE-W09", problem, "remove it") for problem in settings_without_effect(recipe, unread)]


def warn_of_missing_dropout(recipe: Recipe, only_local: bool = False) -> list[SettingsWarning]:
    """Warn of a student without dropout whose objective contrasts two views, and of a generator without the dropout asked for."""
    found, student = list[SettingsWarning](), recipe.student
    keys = [f"objective.{key}" for key, term in recipe.objective.active_terms.items() if term.contrasts_views]
    if keys and not (_has_dropout(student, only_local) if student.dropout is None else student.dropout):
        found.append(
            SettingsWarning(
                "DCSE-W01",
                f"{student.backbone} has no dropout, so that both views of a sentence are equal, and {' and '.join(keys)} "
                f"{'compare' if len(keys) > 1 else 'compares'} them",
                f"write student.dropout: 0.1, or {keys[0]}: null",
            )
        )
    detection = recipe.objective.active(DetectionSection)
    if detection is None or not detection.generator_dropout:
        return found
    generator = EncoderSection(backbone=detection.generator)
    if not _has_dropout(generator, only_local):
        found.append(
            SettingsWarning(
                "DCSE-W01",
                f"{generator.backbone} has no dropout, so that objective.detection.generator_dropout: true has no effect, and "
                "equal maskings of a sentence get equal edits",
                "write objective.detection.generator_dropout: false, or use a generator with dropout",
            )
        )
    return found


def warn_of_narrow_bands(recipe: Recipe, statistics: Mapping[int, VectorStatistics]) -> list[SettingsWarning]:
    """Warn of teachers with a narrow band of cosines, which count for little in a mean of cosines."""
    if len(statistics) < 2:
        return []
    teachers = recipe.teachers.encoders
    widest = max(statistics, key=lambda number: statistics[number].spread)
    alphas = {number: teachers[number].alpha for number in statistics}
    effective = effective_weights(alphas, statistics)
    return [
        SettingsWarning(
            "DCSE-W02",
            f"teacher {number}, {teachers[number].backbone}, has a narrow band of cosines, {found.band}, and teacher {widest} "
            f"has {statistics[widest].band}: in their mean it weighs {effective[number]:.0%} in effect, not "
            f"{alphas[number] / sum(alphas.values()):.0%}",
            f"raise teachers.encoders.{number}.alpha if it should count for more "
            f"({alphas[number] * statistics[widest].spread / max(found.spread, 1e-6):.2g} makes up for its band)",
        )
        for number, found in statistics.items()
        if found.spread < _NARROW * statistics[widest].spread
    ]


def warn_of_unused_prompts(
    encoders: Mapping[str, EncoderSection],
    only_local: bool = False,
    fix: str = "write {key}.prompt: {prompt}, or another that fits the texts",
) -> list[SettingsWarning]:
    """Warn of encoders that read texts without a prompt, and whose folders name one for every kind of text."""
    warnings = []
    for key, section in encoders.items():
        folder = None if section.prompt else _folder(section, only_local)
        settings = None if folder is None else read_model_file(folder)
        prompts = _prompts_of_all_texts(settings.named_prompts) if settings and not settings.default_prompt else {}
        if prompts:
            named = ", ".join(f"{name}: {prompt!r:.60}" for name, prompt in prompts.items())
            warnings.append(
                SettingsWarning(
                    "DCSE-W04",
                    f"{key} reads texts without a prompt, and the folder of {section.backbone} names prompts ({named})",
                    fix.format(key=key, prompt=f"{next(iter(prompts.values()))!r:.60}"),
                )
            )
    return warnings


def _prompts_of_all_texts(prompts: Mapping[str, str]) -> dict[str, str]:
    """Return the prompts of a folder that names one for every kind of text; none if a kind has no prompt.

    sentence-transformers writes an empty `query` and `document` into every folder. Next to prompts of other names, such as
    `passage`, they say nothing.
    """
    texts = {name: prompt for name, prompt in prompts.items() if prompt}
    empty = prompts.keys() - texts.keys()
    says_nothing = empty <= set(UNNAMED_PROMPTS) and not texts.keys() <= set(UNNAMED_PROMPTS)
    return texts if not empty or says_nothing else {}


def warn_of_few_steps(steps: int, steps_per_epoch: int, max_steps: int | None) -> list[SettingsWarning]:
    """Warn of a run with fewer steps than any that was measured; `max_steps` is `training.max_steps`."""
    if steps >= _FEWEST_STEPS:
        return []
    is_limited = max_steps is not None and max_steps < _FEWEST_STEPS
    epochs = f"training.epochs={-(-_FEWEST_STEPS // steps_per_epoch)}, or give more text"
    return [
        SettingsWarning(
            "DCSE-W05",
            f"{steps:,} {'step is' if steps == 1 else 'steps are'} few: we saw poor results below {_FEWEST_STEPS}",
            f"write training.max_steps=null, and if needed {epochs}" if is_limited else f"write {epochs}",
        )
    ]


def warn_of_cut_rows(
    share: float, max_length: int, key: str = "student.max_length and that of the teachers", rows: str = "rows"
) -> list[SettingsWarning]:
    """Warn of a text that is truncated more often than any that was measured."""
    if share <= _MOST_CUT:
        return []
    return [
        SettingsWarning(
            "DCSE-W06",
            f"{share:.0%} of the {rows} have more than {max_length} tokens and are truncated, and at most {_MOST_CUT:.0%} were "
            "in the runs that we measured",
            f"raise {key}, or split the text into sentences",
        )
    ]


def warn_of_unknown_tokens(shares: Mapping[str, float]) -> list[SettingsWarning]:
    """Warn of encoders whose tokenizers do not know the text: `shares` has the share of unknown tokens by encoder."""
    return [
        SettingsWarning(
            "DCSE-W10",
            f"{share:.0%} of the text's tokens are unknown to the tokenizer of {name}, which reads all of them as the same one",
            "take a model that knows the language, such as a multilingual one",
        )
        for name, share in shares.items()
        if share > _MOST_UNKNOWN
    ]


def warn_of_curve(scores: Sequence[tuple[int, float]], steps: int, training: TrainingSection) -> list[SettingsWarning]:
    """Warn of a run whose dev score was still improving at its end, and of one that saves its start, the best by dev score."""
    if not scores:
        return []
    found, (step, last), highest = list[SettingsWarning](), scores[-1], max(score for _, score in scores)
    before = [entry for entry in scores if 0 < entry[0] <= (1 - _LAST_PART) * steps]
    if before and last == highest and last - before[-1][1] > _NOISE:
        is_limited = training.max_steps == steps
        longer = f"training.max_steps={2 * steps}" if is_limited else f"training.epochs={2 * training.epochs:g}"
        found.append(
            SettingsWarning(
                "DCSE-W07",
                f"the dev score was still improving at the end, by {last - before[-1][1]:.2f} from step {before[-1][0]:,} to "
                f"{step:,}",
                f"train longer ({longer}), or give more text",
            )
        )
    if len(scores) > 1 and scores[0][1] == highest:
        found.append(
            SettingsWarning(
                "DCSE-W11",
                f"no checkpoint has a higher dev score than the start, {highest:.2f} (at step {step:,}: {last:.2f}), so the "
                "model that is saved is the start, unchanged",
                f"lower training.lr ({training.lr / 3:.2g}), or train longer",
            )
        )
    return found


def warn_of_weak_label_source(
    name: str, key: str, score: float, labels: float, without: float, dev: str
) -> list[SettingsWarning]:
    """Warn of a group of a mutual distillation whose scores make the labels worse."""
    if without - labels <= _NOISE:
        return []
    return [
        SettingsWarning(
            "DCSE-W08",
            f"group {name} is a weak source of labels: its start has {score:.2f} on {dev}, and the labels have {labels:.2f} with "
            f"it and {without:.2f} without",
            f"lower {key}.weight, write mutual.standardize: true if its cosines lie in a narrow band, or give it a better start",
        )
    ]


def _folder(section: EncoderSection, only_local: bool) -> Path | None:
    """Return the folder with an encoder's settings; None if it would have to be downloaded and `only_local` is set.

    None for a folder without a config.json, too: opening it says what is wrong.
    """
    if only_local:
        return find_local_model(section.backbone, section.trust_remote_code, _SETTINGS_FILES)
    folder = resolve_model(section.backbone, section.trust_remote_code, _SETTINGS_FILES)
    return folder if (backbone_folder(folder) / CONFIG_FILE).is_file() else None


def _has_dropout(section: EncoderSection, only_local: bool) -> bool:
    """Return whether an encoder's folder has dropout; True for one that is not read."""
    folder = _folder(section, only_local)
    return folder is None or has_dropout(ModelFolder.read(folder, section.trust_remote_code).load_config())
