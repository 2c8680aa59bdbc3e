"""Mutual distillation (Trans-Encoder): bi- and cross-encoders of several language models train each other, one group per model.

A run consists of cycles of two phases: cross-encoders train on the bi-encoders' cosines, then bi-encoders on the
cross-encoders' probabilities. Each group trains and scores independently. Groups exchange only one score per pair, and get
back the mean as labels. `phases.json` records the progress of each group, so that a run can resume after any crash.
"""
