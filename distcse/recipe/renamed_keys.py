"""Recipe keys of version 0.1 and their current names, for `distcse recipe migrate` and for errors about old keys."""

from __future__ import annotations

RENAMED_KEYS = {
    "objective.own": "objective.custom",
    "objective.own.*.code": "objective.custom.*.class_path",
    "objective.own.*.knobs": "objective.custom.*.kwargs",
    "objective.info_nce.false_negatives.above": "objective.info_nce.false_negatives.threshold",
    "objective.rank.memory": "objective.rank.queue",
    "objective.rank.memory.batches": "objective.rank.queue.num_batches",
    "objective.rank.memory.landmarks": "objective.rank.queue.num_anchors",
    "objective.rank.memory.refresh": "objective.rank.queue.refresh_steps",
    "student.start_share": "student.init_weight_mix",
    "student.word_dimension": "student.embedding_size",
    "student.depth": "student.num_layers",
    "teachers.encoders.*.code": "teachers.encoders.*.class_path",
    "teachers.encoders.*.knobs": "teachers.encoders.*.kwargs",
    "teachers.encoders.*.space": "teachers.encoders.*.similarity",
    "teachers.encoders.*.references": "teachers.encoders.*.num_references",
    "teachers.encoders.*.ranks": "teachers.encoders.*.rank_method",
    "teachers.encoders.*.endpoint.key_variable": "teachers.encoders.*.endpoint.api_key_env",
    "teachers.encoders.*.endpoint.batch": "teachers.encoders.*.endpoint.batch_size",
    "teachers.encoders.*.endpoint.timeout": "teachers.encoders.*.endpoint.timeout_s",
    "teachers.builders": "teachers.embedding_workers",
    "teachers.builder_gpus": "teachers.gpus_per_actor",
    "teachers.servers": "teachers.num_servers",
    "teachers.nodes": "teachers.node_labels",
    "teachers.deadline": "teachers.heartbeat_timeout_s",
    "teachers.block_steps": "teachers.prefetch_steps",
    "teachers.shuffle_groups": "teachers.rank_noise_group",
    "teachers.trust": "teachers.disagreement_scale",
    "training.neighbours": "training.neighbor_batching",
    "training.neighbours.companions": "training.neighbor_batching.per_anchor",
    "training.neighbours.nearest": "training.neighbor_batching.min_rank",
    "training.neighbours.farthest": "training.neighbor_batching.max_rank",
    "training.neighbours.share": "training.neighbor_batching.anchor_fraction",
    "training.least_workers": "training.min_workers",
    "training.nodes": "training.node_labels",
    "training.dropout_streams": "training.dropout_rng_streams",
    "training.chunk": "training.grad_cache_chunk",
    "evaluation.held_out": "evaluation.num_heldout",
    "evaluation.every": "evaluation.eval_steps",
    "evaluation.beside": "evaluation.async_eval",
    "evaluation.final": "evaluation.final_suites",
    "pairs.mine.neighbours": "pairs.mine.num_neighbors",
    "groups.*.nodes": "groups.*.node_labels",
    "mutual.initialisation": "mutual.initialization",
    "track": "loggers",
}
"""Old path → new path of a key; `*` is a position in a list or a name that the user chose."""

RENAMED_VALUES = {
    "training.engine": {"plain": "torch"},
    "bi.engine": {"plain": "torch"},
    "cross.engine": {"plain": "torch"},
}
"""Path → old value → new value."""

RENAMED_SWEEP_KEYS = {
    "knobs": "parameters",
    "knobs.*.equals": "parameters.*.expression",
    "search.startup": "search.n_startup_trials",
    "schedule.grace": "schedule.grace_period",
    "schedule.reduction": "schedule.reduction_factor",
    "winner": "final_runs",
    "trackers": "loggers",
}
"""The same for search spaces. The keys of `parameters` are recipe paths, and are renamed by `RENAMED_KEYS`."""
