"""Small random encoders of real architectures, with tokenizers built from a few lines of text."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from distcse.models import Encoder

KINDS = ("bert", "roberta", "distilbert", "minilm", "modernbert", "t5")


def make_encoder(
    folder: Path, kind: str, lines: Sequence[str], layers: int = 3, width: int = 32, dropout: float = 0.1, seed: int = 0
) -> Path:
    """Write a random encoder of an architecture and its tokenizer as a Hugging Face folder."""
    tokenizer = _byte_pairs(lines) if kind == "roberta" else _word_pieces(lines)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    wide = {"intermediate_size": 2 * width, "max_position_embeddings": 66}
    bert = {**wide, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    settings: dict[str, dict[str, Any]] = {
        "bert": bert,
        "minilm": {**bert, "hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 192},
        "roberta": {**bert, "type_vocab_size": 1},
        "mpnet": bert,
        "electra": {**bert, "embedding_size": 16},
        "distilbert": {
            "max_position_embeddings": 66,
            "hidden_dim": 2 * width,
            "dropout": dropout,
            "attention_dropout": dropout,
        },
        "t5": {"num_layers": layers, "d_kv": 8, "d_ff": 2 * width, "dropout_rate": dropout},
        "modernbert": {
            **wide,
            **{f"{part}_dropout": dropout for part in ("attention", "mlp", "embedding")},
            **{f"{name}_token_id": tokenizer.cls_token_id for name in ("bos", "cls")},
            **{f"{name}_token_id": tokenizer.sep_token_id for name in ("eos", "sep")},
            "global_attn_every_n_layers": 3,
            "local_attention": 8,
        },
    }
    config = AutoConfig.for_model(
        "bert" if kind == "minilm" else kind,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **{**sizes, **settings[kind]},
    )
    torch.manual_seed(seed)
    model = (AutoModelForTextEncoding if kind == "t5" else AutoModel).from_config(config)
    return _save_scaled(model, tokenizer, folder)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 70,
}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "xlm-roberta": _SIZES,
    "camembert": _SIZES,
    "mpnet": _SIZES,
    "electra": {**_SIZES, "embedding_size": 16},
    "albert": {**_SIZES, "embedding_size": 16},
    "deberta-v2": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ernie": _SIZES,
    "roformer": _SIZES,
    "convbert": _SIZES,
    "longformer": {**_SIZES, "attention_window": 8},
    "mt5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 70},
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen3": _DECODER,
    "gemma3_text": {**_DECODER, "layer_types": ["full_attention"] * 3},
    "xlnet": {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
}
"""Further families of transformers, and their sizes."""
_ENCODER_DECODER: dict[str, Any] = {
    **{"d_model": 32, "max_position_embeddings": 70},
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 3), ("ffn_dim", 64))},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deberta", "fnet", "data2vec-text", "rembert", "mobilebert", "ibert"), _SIZES),
    **dict.fromkeys(("nomic_bert", "eurobert", "modernbert", "esm", "esmc", "dpr"), _SIZES),
    **dict.fromkeys(("gemma2", "phi3", "opt"), _DECODER),
    "bart": _ENCODER_DECODER,
    "longt5": FAMILIES["mt5"],
    **dict.fromkeys(("bros", "xmod", "vilt", "lilt", "big_bird"), _SIZES),
    "beam": {
        **_DECODER,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "xlm": {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 70},
}
"""Families with their sizes for shorter tests."""


def make_family(folder: Path, family: str, lines: Sequence[str], **settings: Any) -> Path:
    """Write a random encoder of one of `FAMILIES` or `MORE_FAMILIES` with a WordPiece tokenizer; `settings` replace its sizes."""
    tokenizer = _word_pieces(lines)
    sizes = {
        **{**FAMILIES, **MORE_FAMILIES}[family],
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        **settings,
    }
    torch.manual_seed(0)
    model = (AutoModelForTextEncoding if family == "mt5" else AutoModel).from_config(
        AutoConfig.for_model(family, **sizes)
    )
    return _save_scaled(model, tokenizer, folder)


_CUSTOM_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

class OwnConfig(PretrainedConfig):
    model_type = "own_encoder"
    attribute_map = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}

    def __init__(self, vocab_size=300, n_embd=32, n_layer=3, resid_pdrop=0.1, **settings):
        self.vocab_size, self.n_embd, self.n_layer, self.resid_pdrop = vocab_size, n_embd, n_layer, resid_pdrop
        super().__init__(**settings)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer))
        self.drop = nn.Dropout(config.resid_pdrop)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None, return_dict=None):
        states = self.words(input_ids)
        for layer in self.layers:
            states = states + self.drop(torch.tanh(layer(states)))
        return BaseModelOutput(last_hidden_state=states)
"""


def make_custom_code(folder: Path, lines: Sequence[str]) -> Path:
    """Write an encoder with its own Python code, whose forward takes only ids and mask, without `get_input_embeddings`."""
    folder.mkdir(parents=True)
    tokenizer = _word_pieces(lines)
    code: dict[str, Any] = {}
    exec(_CUSTOM_CODE, code)
    torch.manual_seed(0)
    code["OwnModel"](code["OwnConfig"](vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(_CUSTOM_CODE)
    change_json(folder / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"})
    return folder


def without_tokenizer(source: Path, folder: Path) -> Path:
    """Copy a model as `AutoModel.save_pretrained` alone writes it: weights and config."""
    folder.mkdir(parents=True)
    for file in (source / "config.json", source / "model.safetensors"):
        shutil.copy(file, folder)
    return folder


def make_masked_lm(folder: Path, encoder: Path, seed: int = 2) -> Path:
    """Write a random masked language model with a small encoder's tokenizer and sizes."""
    torch.manual_seed(seed)
    AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(encoder)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


def make_cross_encoder(folder: Path, encoder: Path, labels: int = 1) -> Path:
    """Write a random scorer of sentence pairs on top of a small encoder's tokenizer and sizes."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    config = AutoConfig.from_pretrained(encoder, num_labels=labels)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    return _save_scaled(model, tokenizer, folder)


def _save_scaled(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save a random model with larger weights, so that different sentences get clearly different vectors."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _word_pieces(lines: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a vocabulary of letters and the most frequent words; tokenizers' own trainer is not deterministic."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer, pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    counts = Counter(
        word
        for line in lines
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(line))
        if len(word) > 1
    )
    letters = sorted({letter for line in lines for letter in normalizer.normalize_str(line) if not letter.isspace()})
    words = sorted(counts, key=lambda word: (-counts[word], word))
    used = [*special, *letters, *(f"##{letter}" for letter in letters), *words][:300]
    pieces = [*used, *(f"[unused{number}]" for number in range(300 - len(used)))]
    tokenizer = Tokenizer(WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _byte_pairs(lines: Sequence[str]) -> PreTrainedTokenizerFast:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=400, special_tokens=special)
    tokenizer = Tokenizer.from_str(bpe.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def change_json(file: Path, **values: Any) -> None:
    """Set values in a JSON file, which need not exist."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def their_vectors(folder: Path, texts: Sequence[str], **settings: Any) -> np.ndarray:
    """Embed texts with sentence-transformers; `settings` are those of its model."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", **settings)
    vectors: np.ndarray = model.encode(list(texts), show_progress_bar=False)
    return vectors


def assert_saved_alike(
    encoder: Encoder, folder: Path, texts: Sequence[str], atol: float = 1e-5, **settings: Any
) -> Encoder:
    """Save an encoder, and assert that distcse and sentence-transformers read the same vectors from the folder.

    Args:
        encoder: The encoder.
        folder: Where it is saved.
        texts: Texts to compare.
        atol: Largest difference of distcse's vectors; those of sentence-transformers may differ by 1e-5.
        settings: Settings with which both load the folder.

    Returns:
        The encoder that was loaded from the folder.
    """
    vectors = encoder.encode(texts)
    encoder.save(folder)
    again = Encoder.load(folder, **settings)
    np.testing.assert_allclose(again.encode(texts), vectors, atol=atol, rtol=0)
    np.testing.assert_allclose(their_vectors(folder, texts, **settings), vectors, atol=1e-5, rtol=0)
    return again
