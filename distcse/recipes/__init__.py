"""Packaged recipes: one YAML file per method and backbone."""
