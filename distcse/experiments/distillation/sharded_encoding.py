"""Encodes the sentences of a dev score on all training workers, each its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.device import to_device
from distcse.device_defaults import defaults_of
from distcse.distributed import all_gather_parts, on_all_ranks, rank, world_size
from distcse.models import Encoder
from distcse.models.kept_tokens import KeptTokens

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def make_dev_encode(
    encoder: Encoder, tokens: KeptTokens, precision: str, normalize: bool | None, is_sharded_model: bool
) -> Encode:
    """Return a function that encodes texts, the same ones on every worker.

    On GPUs, the workers share the texts. On CPUs, each worker encodes all of them: other batches would round differently, and
    a run on another number of workers would have other scores. So it does with ZeRO 3, where every worker takes part in every
    forward pass.

    Args:
        encoder: The student.
        tokens: Token ids of the texts, from earlier scores.
        precision: Precision of the forward passes.
        normalize: See `Encoder.encode`.
        is_sharded_model: Whether the weights are partitioned over the workers (ZeRO 3).
    """

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        return tokens.encode(encoder, texts, normalize, precision)

    shares = defaults_of(encoder.device).shards_dev_scores and world_size() > 1 and not is_sharded_model
    return (lambda texts: encode_shares(encode, texts, encoder.device)) if shares else encode


def encode_shares(encode: Encode, texts: Sequence[str], device: torch.device) -> NDArray[np.float32]:
    """Encode this worker's share of n texts, and gather the (n, d) vectors of all.

    Args:
        encode: Encodes texts in this process.
        texts: The texts, the same on every worker.
        device: Device whose tensors the process group's backend can send.
    """
    # Dealt out by length, so that shares take equally long.
    workers = world_size()
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    order = [index for first in range(workers) for index in by_length[first::workers]]
    per_worker = -(-len(order) // workers)
    begins = [min(number * per_worker, max(0, len(order) - per_worker)) for number in range(workers)]
    share = [
        texts[index] for index in order[begins[rank()] :][:per_worker]
    ]  # all equally long; the last ones may overlap
    part = on_all_ranks(lambda: torch.from_numpy(encode(share)))
    parts = [part.cpu().numpy() for part in all_gather_parts(to_device(part, device))]
    vectors = np.empty((len(order), parts[0].shape[1]), dtype=parts[0].dtype)
    for begin, gathered in zip(begins, parts, strict=True):
        vectors[order[begin : begin + per_worker]] = gathered
    return vectors
