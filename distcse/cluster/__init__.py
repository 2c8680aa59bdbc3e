"""The only package that imports Ray: the cluster, actors of teachers and groups, Ray Train, Ray Tune, and metrics."""
