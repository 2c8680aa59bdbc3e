"""Write a model's folder in the sentence-transformers layout.

sentence-transformers 5.4 and later write compact files that TEI, older vLLM and older llama.cpp misread. distcse writes the
legacy form that all of them, and sentence-transformers 2 to 6, read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from distcse.models.files import WEIGHTS, read_json, write_checksums, write_json
from distcse.models.pooling import Dense
from distcse.models.st_format import LEGACY_POOLINGS, Layout
from distcse.storage import ArtifactStore, open_store


@contextmanager
def replacing(path: str | Path | ArtifactStore) -> Iterator[Path]:
    """Replace a model's folder atomically, with checksums of its weights, and store it; a failure leaves the old one."""
    store = open_store(path)
    with store.write_folder() as temporary:
        yield temporary
        write_checksums(temporary)
    store.publish()


def save_model(model: Any, tokenizer: Any, folder: Path, max_length: int) -> None:
    """Save a transformers model and its tokenizer in a folder that transformers 4 reads too.

    A tokenizer without a padding token gets its end token as one: sentence-transformers pads every batch.
    """
    tokenizer.model_max_length = max_length
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config, settings = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    write_json(folder / "config.json", {**config, **_positions_of_4(config)})
    if settings["tokenizer_class"] == "TokenizersBackend":  # in version 4, whose default also has token_type_ids:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["model_input_names"] = list(tokenizer.model_input_names)
    if "extra_special_tokens" in settings:  # a dictionary in version 4
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    write_json(folder / "tokenizer_config.json", settings)


def _positions_of_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys by which transformers 4 reads rotary positions and ModernBERT's kinds of layers.

    It ignores `rope_parameters` and ModernBERT's `layer_types`, and would compute other vectors.
    """
    parameters = config.get("rope_parameters") or {}
    if "full_attention" in parameters:  # of Gemma 3, then of ModernBERT
        names = {"full_attention": ("rope_theta", "global_rope_theta")}
        names["sliding_attention"] = ("rope_local_base_freq", "local_rope_theta")
        found = {
            kind: parameters[kind]["rope_theta"] for kind in names if parameters.get(kind)
        }  # null: no positions there
        keys = {key: theta for kind, theta in found.items() for key in names[kind]}
        is_full = [kind == "full_attention" for kind in config["layer_types"]]
        for period in range(1, len(is_full) + 1):
            if is_full == [layer % period == 0 for layer in range(len(is_full))]:
                return {**keys, "global_attn_every_n_layers": period}
        return keys
    theta = {key: value for key, value in parameters.items() if key == "rope_theta"}
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return theta if scaling.get("rope_type", "default") == "default" else {**theta, "rope_scaling": scaling}


def write_layout(folder: Path, layout: Layout, width: int, head: nn.Sequential) -> None:
    """Write modules.json and the files for pooling, head, length and prompt, in the legacy form."""
    pooling = layout.pooling
    assert pooling is not None
    kinds = ["Transformer", "Pooling"]
    kinds += ["Dense" if isinstance(module, Dense) else "Normalize" for module in head]
    if layout.normalize:
        kinds.append("Normalize")
    paths = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    for path, module in zip(paths[2:], head, strict=False):
        if isinstance(module, Dense):
            write_json(folder / path / "config.json", module.shape.to_config())
            weights = {
                name: weight.detach().to("cpu", torch.float32).contiguous()
                for name, weight in module.state_dict().items()
            }
            save_file(weights, folder / path / WEIGHTS)
    name = "lasttoken" if pooling == "last_token" else pooling
    flags = {key: mode == name for key, mode in LEGACY_POOLINGS.items()}
    write_json(
        folder / paths[1] / "config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": layout.pools_prompt},
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": layout.max_length, "do_lower_case": False})
    prompts, default = _named_prompts(layout)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "__version__": {},
            "prompts": prompts,
            "default_prompt_name": default,
            "similarity_fn_name": layout.similarity,
            **({} if layout.truncate_dim is None else {"truncate_dim": layout.truncate_dim}),
        },
    )


def _named_prompts(layout: Layout) -> tuple[dict[str, str], str | None]:
    """Return the prompts to save, and the name of the default one: the folder's name for it, or else `default`."""
    prompts = dict(layout.prompts)
    if not layout.prompt:
        return prompts, None
    name = next((name for name, prompt in prompts.items() if prompt == layout.prompt), "default")
    return {**prompts, name: layout.prompt}, name
