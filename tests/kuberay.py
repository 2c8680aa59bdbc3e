"""The fields that documents in cluster/ may have.

Kubernetes' own documents and pod templates are held to its published schemas, as the package kubernetes-validate brings them.
KubeRay's fields are written here from its API reference (docs/reference/api.md of ray-project/kuberay, version 1.6's), not copied
from the published CRDs: names, types, what is required and which words are allowed. What the reference leaves to an expression
on the server, such as which fields of a RayJob go together, is not checked here.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = ("1.28", "1.37")
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
WORDS: Schema = {"type": "object", "additionalProperties": TEXT}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


META = fields("name", name=NAME, namespace=NAME, labels=WORDS, annotations=WORDS)
POD: Schema = {"type": "object"}  # Kubernetes' own schema says what is in it
_GROUP = {"rayStartParams": WORDS, "template": POD, "resources": WORDS, "labels": WORDS}
CLUSTER_SPEC = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    suspend=FLAG,
    managedBy=one_of("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
    authOptions=fields(mode=one_of("disabled", "token"), secretName=NAME, enableK8sTokenAuth=FLAG),
    enableInTreeAutoscaling=FLAG,
    headServiceAnnotations=WORDS,
    upgradeStrategy=fields(type=one_of("Recreate", "None")),
    headGroupSpec=fields(
        "template",
        serviceType=one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
        enableIngress=FLAG,
        **_GROUP,
    ),
    workerGroupSpecs=many(
        fields(
            "groupName",
            "template",
            "minReplicas",
            "maxReplicas",
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            idleTimeoutSeconds=COUNT,
            priority={"type": "integer"},
            suspend=FLAG,
            **_GROUP,
        )
    ),
)
JOB_SPEC = fields(
    "rayClusterSpec",
    "entrypoint",
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    metadata=WORDS,
    suspend=FLAG,
    backoffLimit=COUNT,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    preRunningDeadlineSeconds={"type": "integer", "minimum": 1},
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    entrypointResources=TEXT,
    clusterSelector=WORDS,
    submitterConfig=fields(backoffLimit=COUNT),
    submitterPodTemplate=POD,
    rayClusterSpec=CLUSTER_SPEC,
)
MONITOR_SPEC = fields(
    "selector",
    "podMetricsEndpoints",
    selector=fields(matchLabels=WORDS),
    podMetricsEndpoints=many(fields(port=NAME, path=TEXT, interval=TEXT)),
)

_CUSTOM = {
    ("ray.io/v1", "RayJob"): JOB_SPEC,
    ("ray.io/v1", "RayCluster"): CLUSTER_SPEC,
    ("monitoring.coreos.com/v1", "PodMonitor"): MONITOR_SPEC,
}


def check(manifest: Any) -> None:
    """`jsonschema.ValidationError` where a document, or a pod template in it, has a field that is not documented.

    What is Kubernetes' own is held to the schemas it publishes, of the oldest and of a new version.
    """
    custom = _CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    spec = custom or {"type": "object"}
    words = fields("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec)
    jsonschema.validate(manifest, words)
    named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
    for document in [manifest] if custom is None else [{**named, "template": pod} for pod in pods(manifest)]:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def cluster_spec(manifest: Any) -> Any:
    """Of a RayJob or a RayCluster."""
    return manifest["spec"]["rayClusterSpec"] if manifest["kind"] == "RayJob" else manifest["spec"]


def pods(manifest: Any) -> list[Any]:
    """Pod templates of a RayJob or a RayCluster; other documents have none."""
    if manifest["apiVersion"] != "ray.io/v1":
        return []
    spec = cluster_spec(manifest)
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*templates, submitter] if submitter else templates
