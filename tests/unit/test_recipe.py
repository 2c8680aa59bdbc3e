"""Recipes: defaults, files, overrides, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcse.errors import PATHS_BY_NAME, InvalidValueError, RecipeError, RecipeNotFoundError, RecipeSyntaxError
from distcse.preflight.inputs import require_inputs
from distcse.recipe import MutualRecipe, Recipe, Sweep, load_recipe, packaged_recipes, read_recipe, recipe_yaml
from distcse.recipe.section import sections_of
from tests.failures import fails_with

TABLE_9 = {
    "rankcse-listnet-bert-base": ("list_net", 3e-5, 0.025, 0.0125),
    "rankcse-listmle-bert-base": ("list_mle", 2e-5, 0.05, None),
    "rankcse-listnet-bert-large": ("list_net", 3e-5, 0.05, 0.025),
    "rankcse-listmle-bert-large": ("list_mle", 2e-5, 0.05, None),
    "rankcse-listnet-roberta-base": ("list_net", 2e-5, 0.05, 0.025),
    "rankcse-listmle-roberta-base": ("list_mle", 3e-5, 0.05, None),
    "rankcse-listnet-roberta-large": ("list_net", 3e-5, 0.025, 0.0125),
    "rankcse-listmle-roberta-large": ("list_mle", 3e-5, 0.025, None),
}

SIMCSE = {
    "simcse-bert-base": (64, 3e-5),
    "simcse-bert-large": (64, 1e-5),
    "simcse-roberta-base": (512, 1e-5),
    "simcse-roberta-large": (512, 3e-5),
}
DIFFCSE = {
    "diffcse-bert-base": (64, 7e-6, 0.3, 0.005),
    "diffcse-roberta-base": (64, 1e-5, 0.2, 0.005),
    "diffcse-bert-base-transfer": (64, 2e-6, 0.15, 0.05),
    "diffcse-roberta-base-transfer": (128, 3e-6, 0.15, 0.05),
}
RANK_ENCODER = {
    "rankencoder-bert-base": (64, 3e-5, "hinge", 0.8, "same_view"),
    "rankencoder-simcse-bert-base": (64, 3e-5, "sum", 0.9999, "cross_view"),
    "rankencoder-promptbert-bert-base": (256, 1e-5, "hinge", 0.8, "cross_view"),
    "rankencoder-sncse-bert-base": (128, 1e-5, "sum", 0.9999, "cross_view"),
}


_MODELS = [f"trans-encoder-{kind}-{size}" for kind in ("bert", "roberta", "mutual") for size in ("base", "large")]
BINARY = {f"{model}-{task}" for model in _MODELS for task in ("qqp", "qnli", "mrpc")}
SICKR = {"trans-encoder-bert-base-sickr", "trans-encoder-mutual-base-sickr"}
TRANS_ENCODER = {*_MODELS, *BINARY, *SICKR, "trans-encoder-mutual-base-large"}


def test_all_packaged_recipes_load() -> None:
    others = {"quickstart", "minilm-3layer", "best-small", "rankcse-in-rank-space", "minilm-mutual", "three-mutual"}
    others |= {"three-teachers", "three-teachers-family"}
    assert set(packaged_recipes()) == {*TABLE_9, *SIMCSE, *DIFFCSE, *RANK_ENCODER, *TRANS_ENCODER, *others}
    for name in packaged_recipes():
        assert recipe_yaml(read_recipe(name)).splitlines()[0] == f"name: {name}"


@pytest.mark.parametrize(
    ("name", "overrides", "use"),
    [
        ("minilm-3layer", ["evaluation.dev=stsb"], "evaluation.dev"),
        ("minilm-3layer", ["evaluation.final_suites=[agreement, sts]"], "evaluation.final_suites"),
        ("minilm-3layer", ["evaluation.rank_inference={}"], "evaluation.rank_inference"),
        ("minilm-3layer", ["corpus.exclude_evaluation=true"], "corpus.exclude_evaluation"),
        ("trans-encoder-bert-base", ["evaluation.dev=none"], "pairs.task"),
        ("minilm-mutual", ["pairs={mine: {corpus: {path: x.txt}}}"], "evaluation.dev"),
        (
            "minilm-mutual",
            ["pairs={mine: {corpus: {path: x.txt, exclude_evaluation: true}}}", "evaluation.dev=none"],
            "pairs.mine.corpus.exclude_evaluation",
        ),
    ],
)
def test_labelled_sets_are_needed_by_a_run_and_not_by_the_recipe(name: str, overrides: list[str], use: str) -> None:
    recipe = read_recipe(name, overrides)
    assert use in str(recipe.inputs.labelled_for)
    with fails_with(InvalidValueError, use, "write evaluation.data: FOLDER"):
        require_inputs(recipe)


@pytest.mark.parametrize("name", TABLE_9)
def test_table_9(name: str) -> None:
    recipe = load_recipe(name)
    form, lr, tau2, tau3 = TABLE_9[name]
    rank, training = recipe.objective.rank, recipe.training
    assert rank is not None
    assert (rank.form, training.lr, rank.tau2) == (form, lr, tau2)
    assert tau3 is None or rank.tau3 == tau3
    assert (training.batch_size, training.epochs, training.warmup, recipe.evaluation.eval_steps) == (128, 4, 0.05, 125)
    assert recipe.objective.tau1 == 0.05
    weights = [teacher.alpha for teacher in recipe.teachers.encoders]
    assert weights[0] / sum(weights) == pytest.approx(1 / 3)
    assert recipe.evaluation.final_suites == "with_transfer"
    assert recipe.dev_score == "agreement" and load_recipe(name, ["evaluation.data=x"]).dev_score == "stsb"


@pytest.mark.parametrize("name", SIMCSE)
def test_simcse(name: str) -> None:
    recipe = load_recipe(name)
    training, terms = recipe.training, recipe.objective
    assert (training.batch_size, training.lr, training.epochs, training.warmup) == (*SIMCSE[name], 1, 0)
    assert terms.info_nce and terms.tau1 == 0.05 and not (terms.rank or terms.consistency or terms.detection)
    assert recipe.dev_score == "none" and load_recipe(name, ["evaluation.data=x"]).dev_score == "stsb"


@pytest.mark.parametrize("name", DIFFCSE)
def test_diffcse(name: str) -> None:
    recipe = load_recipe(name)
    training, terms = recipe.training, recipe.objective
    assert terms.detection is not None and recipe.student.projection == "batch_norm_mlp"
    found = (training.batch_size, training.lr, terms.detection.masking_ratio, terms.detection.weight)
    assert found == DIFFCSE[name] and training.epochs == 2
    assert terms.detection.sampling == "argmax"
    suites = "with_transfer" if name.endswith("-transfer") else None
    assert recipe.evaluation.final_suites == suites and recipe.dev_score == "none"


@pytest.mark.parametrize("name", RANK_ENCODER)
def test_rank_encoder(name: str) -> None:
    recipe = load_recipe(name)
    training, terms, teacher = recipe.training, recipe.objective, recipe.teachers.encoders[0]
    term = terms.rank_regression
    assert term is not None and (term.weight, term.lower) == (0.05, 0.5) and teacher.similarity == "rank"
    found = (training.batch_size, training.lr, terms.combine, term.upper, term.student_similarity)
    assert found == RANK_ENCODER[name] and recipe.seed == 61507 and teacher.num_references == 100_000


@pytest.mark.parametrize("name", sorted(BINARY))
def test_trans_encoders_binary_tasks(name: str) -> None:
    recipe = read_recipe(name, ["evaluation.data=x"])
    assert isinstance(recipe, MutualRecipe)
    kind, size, task = name.removeprefix("trans-encoder-").split("-")
    assert [group.name for group in recipe.groups] == (["bert", "roberta"] if kind == "mutual" else [kind])
    assert all(size in group.backbone and size in str(group.cross_backbone) for group in recipe.groups)
    bi, cross = recipe.bi, recipe.cross
    assert (bi.batch_size, bi.epochs, cross.epochs, recipe.mutual.cycles) == (128 if size == "base" else 64, 15, 3, 5)
    assert cross.both_orders == (task != "qnli")
    assert (recipe.pairs.task, recipe.evaluation.dev, recipe.evaluation.final_suites) == (task, task, ["pairs"])


def test_resolved_recipe_reads_back_unchanged(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["training.lr=1e-5", "seed=7"])
    assert recipe.training.lr == 1e-5
    stored = tmp_path / "recipe.yaml"
    stored.write_text(recipe_yaml(recipe))
    assert load_recipe(str(stored)) == recipe


def test_overrides_reach_lists_null_and_new_sections() -> None:
    recipe = load_recipe(
        "rankcse-listnet-bert-base",
        [
            "teachers.encoders.1.alpha=5",
            "objective.consistency=null",
            "objective.rank.eps=1e-7",
            "student.layers=[0, 2]",
        ],
    )
    assert recipe.teachers.encoders[1].alpha == 5
    assert recipe.objective.consistency is None
    assert recipe.objective.rank is not None and recipe.objective.rank.eps == 1e-7
    assert recipe.student.layers == [0, 2]


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTCSE_CACHE", "here")
    (tmp_path / "model").mkdir()
    generator = load_recipe("diffcse-bert-base", ["objective.detection.generator=model"]).objective.detection
    assert generator is not None and generator.generator == str(tmp_path / "model")
    recipe = load_recipe("minilm-3layer", ["corpus.path=a.txt", "student.backbone=model"])
    assert recipe.corpus.path == str(tmp_path / "a.txt")
    assert recipe.student.backbone == str(tmp_path / "model")
    assert recipe.storage.cache == str(tmp_path / "here")
    assert load_recipe("minilm-3layer", ["storage.cache=there"]).storage.cache == str(tmp_path / "there")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("objective.rank.tau_2=3", "unknown key objective.rank.tau_2 (value 3); did you mean 'tau2'?"),
        ("teachers.encoders.0.alhpa=3", "unknown key teachers.encoders.0.alhpa (value 3); did you mean 'alpha'?"),
        (
            "teachers.encoders.0.endpoint={url: 'http://x', api_key: sk-hush}",
            "unknown key teachers.encoders.0.endpoint.api_key; ",
        ),
        ("loggers.passwd=hush", "unknown key loggers.passwd; "),
        ("trainig.lr=3", "unknown key trainig (value {'lr': 3}); did you mean 'training'?"),
        ("tau2=0.1", "unknown key tau2 (value 0.1); valid keys: name, "),
        ("learning_rate=3", "unknown key learning_rate (value 3); did you mean 'training.lr'?"),
        ("training.learning_rate=3", "unknown key training.learning_rate (value 3); did you mean 'lr'?"),
        ("optimizer.lr=3", "unknown key optimizer (value {'lr': 3}); valid keys: name, "),
        ("corpus=FILE", "corpus is 'FILE'; expected a mapping; write corpus.path=FILE"),
        ("student=X", "write student.backbone=X"),
        ("teacher=X", "did you mean 'teachers.encoders.0.backbone'?"),
        ("teachers=X", "write teachers.encoders.0.backbone=X"),
        ("teachers.encoders=[X]", "write teachers.encoders.0.backbone=X"),
        ("teachers.encoders=X", "write teachers.encoders.0.backbone=X"),
        ("training=fast", "write its keys, such as training.batch_size"),
        ("training.num_workers=2", "did you mean 'workers'?"),
        ("teachers.encoders.0.model=X", "did you mean 'backbone'?"),
        ("student.num_hidden_layers=3", "did you mean 'num_layers'?"),
        ("model=X", "did you mean 'student.backbone'?"),
        ("epochs=3", "unknown key epochs (value 3); did you mean 'training.epochs'?"),
        ("training.lr=fast", "training.lr is 'fast'; expected a valid number"),
        ("training.lr=-1", "training.lr is -1; expected greater than 0"),
        ("training.lr=2", "training.lr is 2; expected less than or equal to 1"),
        ("seed=1.5", "seed is 1.5; expected a"),
        ("corpus.limit=0", "corpus.limit is 0; expected greater than or equal to 1"),
        ("student.layers=[0, a]", "student.layers.1 is 'a'; expected a"),
        ("student.layers=[4, 2]", "layers must be ascending and distinct"),
        ("student.pooling=avg", "student.pooling is 'avg'; expected 'cls'"),
        ("objective.rank.form=listnet", "did you mean 'list_net'?"),
        ("training=5", "training is 5; expected "),
        ("training.workers=3", "workers is 3, which does not divide batch_size 128; allowed: 1, 2, 4"),
        ("training.min_workers=2", "min_workers is 2, and workers 1"),
        ("training.dropout_rng_streams=3", "dropout_rng_streams is 3, which does not divide batch_size 128"),
        ("training.gradient_accumulation=7", "evaluation.eval_steps is 50, which is no multiple"),
        (
            "corpus.dataset=x",
            "gives path and dataset, but a corpus has one source; keep one, and set the other to null",
        ),
        ("teachers.encoders=[]", "objective.regression needs teachers"),
        ("objective.regression=null", "objective has no term"),
        (
            "evaluation.final_suites=sts",
            "evaluation.final_suites is 'sts'; expected a valid list or 'with_transfer'; as a list: [sts]",
        ),
        ("evaluation.num_heldout=2", "agreement needs teachers and evaluation.num_heldout of at least 3"),
        ("name=a/b", "allowed: letters, digits"),
        ("teachers.encoders.1.alpha=3", "teachers.encoders.1.backbone is missing"),
        ("teachers.encoders.2.alpha=3", "'2' is no place in a list of 1; allowed: 0 to 1"),
        ("seed.x=3", "seed is 42, which has no keys inside"),
        ("lr", "is not of the form key.path=value"),
        ("seed=[1", "is not a YAML value"),
    ],
)
def test_a_mistake_is_one_error_with_key_value_and_way_out(override: str, named: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("quickstart", ["seed=42", override])
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_newcomers_write_has_a_path_that_exists() -> None:
    known = {
        f"{prefix}{path}.{key}"
        for prefix, document in (("", Recipe), ("sweep.", Sweep))
        for path, section in sections_of(document)
        for key in section.model_fields
    }
    assert {path.replace(".0.", ".*.") for path in PATHS_BY_NAME.values()} <= known


def test_no_term_at_all_is_refused() -> None:
    text = "corpus.path=x.txt"
    terms = [f"objective.{name}=null" for name in ("info_nce", "consistency", "rank")]
    with fails_with(InvalidValueError, "objective has no term"):
        load_recipe("minilm-3layer", [text, *terms])
    weights = ["objective.info_nce.weight=0.0", "objective.consistency.beta=0.0", "objective.rank.gamma=0.0"]
    with fails_with(InvalidValueError, "objective has no term"):
        load_recipe("minilm-3layer", [text, *weights])


def test_lists_need_teachers() -> None:
    with fails_with(InvalidValueError, "objective.rank", "teachers"):
        load_recipe("minilm-3layer", ["corpus.path=x.txt", "teachers.encoders=[]"])


def test_several_mistakes_are_one_error() -> None:
    with fails_with(InvalidValueError, "2 errors", "training.lr is 'x'", "seed is 'y'"):
        load_recipe("quickstart", ["training.lr=x", "seed=y"])


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    for text, kind, *named in (
        ("student: [", RecipeSyntaxError),
        ("- 1", RecipeSyntaxError),
        ("seed: 1\nseed: 2\nstudent: {backbone: x}", RecipeSyntaxError, "line 2", "'seed'", "line 1"),
        ("seed: 1", InvalidValueError, "student"),
        ("student: !!python/object/apply:os.system ['true']", RecipeSyntaxError),
    ):
        file.write_text(text)
        with fails_with(kind, str(file), *named):
            load_recipe(str(file))
    with fails_with(RecipeNotFoundError, "'quickstart'"):
        load_recipe("quikstart")


@pytest.mark.parametrize("key", ["batch_size", "lr", "epochs", "max_steps"])
def test_a_value_of_the_wrong_type_is_not_advised_again(key: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        read_recipe("quickstart", [f"training.{key}=abc"])
    assert f"training.{key} is 'abc'; expected a" in str(raised.value) and "write" not in str(raised.value)
