"""A family: students of several sizes that learn the same targets, and so lie in one space.

Each student is a run of `distcse.runs.distillation` in the folder `members`, which resumes by itself. They train one after
the other, or side by side on a cluster's GPUs. The projection of the teachers' joined vectors is fitted once, in the family's
folder. All are evaluated together at the end.
"""
