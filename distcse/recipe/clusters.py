"""The clusters that jobs are submitted to: `~/.config/distcse/clusters.yaml`, and a team's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from distcse.devices.host import SECRET_SUFFIXES
from distcse.errors import ArgumentError, nearest
from distcse.recipe.loading import parse_document, read_file
from distcse.recipe.section import Section, refuse_secrets
from distcse.recipe.validation_errors import error_class, explain
from distcse.storage import is_uri


class ClusterSection(Section):
    """A cluster that takes jobs, and what each job on it gets."""

    address: str
    """Address of Ray's job API: http://HEAD:8265."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Recipe settings by path, such as `storage.runs`, which a command's settings override. A kind of recipe without a path's
    section does not get it."""
    extras: list[str] = Field(default_factory=lambda: ["tune"])
    """Extras of distcse that jobs install, such as deepspeed; the same for all jobs, because a node installs each set anew."""
    installs: bool = True
    """Whether jobs install what distcse requires; false if the nodes' image has it."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment (`env_vars`, `pip`, …), to which jobs add distcse, its requirements and the recipe's files."""

    @field_validator("address")
    @classmethod
    def _is_of_the_job_api(cls, address: str) -> str:
        refuse_secrets(address, "address", "set RAY_AUTH_TOKEN")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{address!r:.200} is no address of Ray's job API; write http://HEAD:8265")
        return address.rstrip("/")

    @field_validator("runtime_env")
    @classmethod
    def _has_no_files_and_secrets(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := {"working_dir", "py_modules"} & given.keys():
            raise ValueError(f"each job has its own {min(taken)}; take it out")
        if secret := next((name for name in given.get("env_vars") or {} if name.endswith(SECRET_SUFFIXES)), None):
            raise ValueError(f"Ray logs and shows env_vars; set {secret} in the nodes' environment")
        return given


def find_cluster(name: str | None) -> tuple[str, ClusterSection]:
    """Return the cluster of a name in the files, or of an address, with its name. Default: the only one in the files.

    An entry of `~/.config/distcse/clusters.yaml` replaces that of the team's file: `DISTCSE_CLUSTERS`, or `clusters.yaml` here.

    Raises:
        ArgumentError: There is no such cluster, or a name is needed.
        RecipeError: A file is no mapping of clusters, or has an invalid entry.
    """
    if name is not None and is_uri(name):
        return name, _section({"address": name}, "--cluster")
    team = os.environ.get("DISTCSE_CLUSTERS")
    files = [Path(team or "clusters.yaml"), Path("~/.config/distcse/clusters.yaml").expanduser()]
    found = {
        key: (entry, f"{file}: {key}")
        for file in files
        if file.is_file() or (team and file == files[0])
        for key, entry in parse_document(read_file(str(file)), str(file), "a file of clusters", "prod:").items()
    }
    name = next(iter(found)) if name is None and len(found) == 1 else name
    if name is None or name not in found:
        problem = "write --cluster NAME" if name is None else f"no cluster {name!r}{nearest(name, found)}"
        known = f"known: {', '.join(found)}" if found else "they have no `NAME: {address: http://HEAD:8265}`"
        raise ArgumentError(f"{problem}, or --cluster http://HEAD:8265; {known} ({' and '.join(map(str, files))})")
    return name, _section(*found[name])


def _section(entry: Any, source: str) -> ClusterSection:
    try:
        return ClusterSection.model_validate(entry)
    except ValidationError as invalid:
        raise error_class(invalid, ClusterSection)(explain(invalid, ClusterSection, source=source)) from None
