"""Static models: one vector per token, and no transformer. model2vec trains, saves and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from distcse.compat import following_steps
from distcse.devices.host import pip_install
from distcse.errors import MissingDependencyError, ModelFormatError
from distcse.models.encoder import Encoder
from distcse.models.files import read_json
from distcse.models.loading import embedding_shape
from distcse.models.saving import replacing
from distcse.storage import ArtifactStore

PASSES = 3
"""Times that a static model's training sees each sentence."""
LEARNING_RATE = 1e-2
"""Adam's, by default; vectors of single tokens need a larger one than a transformer's weights."""
_SMOOTHING = 1e-4
"""Token frequency at which a token's initial vector is halved (a in SIF, Arora et al. 2017; model2vec's value)."""
TOKENS_PER_BATCH = 1024


def require_model2vec(needed_by: str) -> None:
    """Check that model2vec is installed."""
    if find_spec("model2vec") is None:
        raise MissingDependencyError(f"{needed_by} needs model2vec, which is missing; {pip_install('static')}")
    if (installed := version("model2vec")).split(".")[:2] != ["0", "10"]:
        raise MissingDependencyError(
            f"{needed_by} needs model2vec 0.10, and {installed} is installed; {pip_install('static')}"
        )


def is_static(folder: Path) -> bool:
    """Return whether a folder has a model as model2vec saves it."""
    if read_json(folder / "config.json").get("model_type") == "model2vec":
        return True
    modules = [module for module in read_json(folder / "modules.json", kind=list) if isinstance(module, dict)]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        return False
    is_truncated = bool(read_json(folder / "config_sentence_transformers.json").get("truncate_dim"))
    return modules[0].get("path") in ("", ".", "0_StaticEmbedding") and not is_truncated


class StaticEncoder:
    """Encodes a text to the mean of its tokens' vectors; special and unknown tokens have none."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, folder: str | Path) -> StaticEncoder:
        """Load a static model from a local folder."""
        require_model2vec(f"the static model {folder}")
        from model2vec import StaticModel

        try:
            return cls(StaticModel.from_pretrained(folder))
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            raise ModelFormatError(f"{folder} is no complete static model: {error}; get it again") from None

    @classmethod
    def of_tokens(cls, encoder: Encoder, on_progress: Callable[[int], None] = lambda done: None) -> StaticEncoder:
        """Make a static model of an encoder's vocabulary: each token's vector is that of the text of this token alone.

        Vectors of frequent tokens are shortened (SIF), with the frequencies of Zipf's law, as `model2vec.distill` does; that
        function needs another version of transformers. In vocabularies by descending frequency, ids are ranks.
        """
        from model2vec import StaticModel

        tokenizer, special = encoder.tokenizer.backend_tokenizer, set(encoder.tokenizer.all_special_ids)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        own = tokenizer.get_vocab(with_added_tokens=False)
        # As `tokenizers` numbers them in a file: added tokens follow those of the model.
        tokens = sorted(vocabulary, key=lambda token: (token not in own, vocabulary[token]))
        ids, size = [vocabulary[token] for token in tokens], len(tokens)
        frame = special - {encoder.tokenizer.unk_token_id}  # "a" may be unknown
        (sample,) = encoder.token_ids(["a"], prompt="")
        before = [*takewhile(frame.__contains__, sample)]
        after = [*takewhile(frame.__contains__, reversed(sample))][::-1]
        vectors = np.zeros((size, encoder.dimension), dtype=np.float32)
        embeddings = embedding_shape(encoder.backbone)[0]
        known = [number for number, token in enumerate(ids) if not embeddings or token < embeddings]
        with torch.inference_mode():
            for begin in range(0, len(known), TOKENS_PER_BATCH):
                on_progress(begin)
                numbers = known[begin : begin + TOKENS_PER_BATCH]
                batch = torch.tensor([[*before, ids[number], *after] for number in numbers], device=encoder.device)
                vectors[numbers] = encoder(batch, torch.ones_like(batch)).cpu().numpy()
        probabilities = 1 / np.arange(2, size + 2)
        probabilities /= probabilities.sum()
        vectors *= (_SMOOTHING / (_SMOOTHING + probabilities))[:, None].astype(np.float32)
        vectors[[number for number, token in enumerate(ids) if token in special]] = 0
        if ids != [*range(size)]:
            tokenizer = _renumbered(tokenizer, {token: number for number, token in enumerate(tokens)})
        return cls(StaticModel(vectors, tokenizer, normalize=True, max_length=encoder.max_length))

    def train(
        self,
        texts: Sequence[str],
        targets: NDArray[np.float32],
        held_out: tuple[Sequence[str], NDArray[np.float32]],
        *,
        lr: float = LEARNING_RATE,
        batch_size: int = 64,
        seed: int = 0,
        device: str = "cpu",
        on_step: Callable[[], None] = lambda: None,
    ) -> StaticEncoder:
        """Train the tokens' vectors toward target vectors by their cosine, with model2vec's trainer; return the trained model.

        Args:
            texts: n texts.
            targets: (n, d) targets, of this model's dimension.
            held_out: Texts and their targets, whose mean cosine chooses the weights that are kept: model2vec looks once to four
                times a pass.
            lr: Adam's learning rate.
            batch_size: Texts per step.
            seed: Seed of the order of the texts.
            device: Device to train on.
            on_step: Called before each step; an exception from it ends the training.
        """
        from model2vec.train.similarity import StaticModelForSimilarity

        trained = StaticModelForSimilarity.from_static_model(model=self._model, n_layers=0, out_dim=self.dimension)
        with following_steps(on_step):
            trained.fit(
                list(texts),
                torch.from_numpy(targets),
                learning_rate=lr,
                batch_size=batch_size,
                max_epochs=PASSES,
                early_stopping_patience=None,
                device=device,
                X_val=list(held_out[0]),
                y_val=torch.from_numpy(held_out[1]),
                random_seed=seed,
            )
        return StaticEncoder(trained.to_static_model())

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return int(self._model.dim)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens per text; 0 if there is none."""
        return int(self._model.max_length or 0)

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return int(self._model.embedding.size)

    @property
    def size_bytes(self) -> int:
        """Size of the weights in memory."""
        return int(self._model.embedding.nbytes)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the (n, d) vectors of n texts, of length 1 if the folder says so; zero for a text without known tokens."""
        return np.asarray(self._model.encode(list(texts)), dtype=np.float32)

    def save(self, path: str | Path | ArtifactStore) -> None:
        """Save the model as a folder that model2vec and sentence-transformers load."""
        with replacing(path) as temporary:
            self._model.save_pretrained(temporary)


def _renumbered(tokenizer: Any, numbers: Mapping[str, int]) -> Any:
    """Return a tokenizer without gaps in its ids, which are the rows of a static model's vectors; it adds no special tokens."""
    content = json.loads(tokenizer.to_str())
    if isinstance(content["model"]["vocab"], dict):  # the ids of a list are its indices
        content["model"]["vocab"] = {token: numbers[token] for token in content["model"]["vocab"]}
    for added in content["added_tokens"]:
        added["id"] = numbers[added["content"]]
    content["post_processor"] = None
    return type(tokenizer).from_str(json.dumps(content))
