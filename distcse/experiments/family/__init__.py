"""A family: students of several sizes that learn the same targets one after the other, and so lie in one space.

Each student is a run of `distcse.experiments.distillation` in the folder `members`, which resumes by itself. The largest fits
the projection of the teachers' joined vectors, and the others take its copy. They are evaluated side by side at the end.
"""
