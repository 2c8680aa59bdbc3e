"""Schemas of the Kubernetes documents in cluster/.

Kubernetes' own documents and pod templates are validated with its published schemas, from the package kubernetes-validate.
KubeRay's fields are written here from its API reference (docs/reference/api.md of ray-project/kuberay 1.6), not copied from
the published CRDs: names, types, required fields and allowed values. Rules that the server evaluates, such as which fields of
a RayJob exclude each other, are not checked.
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
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


META = fields("name", name=NAME, namespace=NAME, labels=WORDS, annotations=WORDS)
POD: Schema = {"type": "object"}  # validated with Kubernetes' schema
_GROUP = {"rayStartParams": WORDS, "template": POD, "resources": WORDS, "labels": WORDS}
CLUSTER_SPEC = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    suspend=FLAG,
    managedBy=one_of("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
    authOptions=fields(mode=one_of("disabled", "token"), secretName=NAME, enableK8sTokenAuth=FLAG),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        version=one_of("v1", "v2"),
        upscalingMode=one_of("Default", "Aggressive", "Conservative"),
        idleTimeoutSeconds=COUNT,
        resources=fields(requests=WORDS, limits=WORDS),
        image=TEXT,
        imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
        securityContext={"type": "object"},
        env={"type": "array"},
        envFrom={"type": "array"},
        volumeMounts={"type": "array"},
    ),
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
    """Validate a document and its pod templates.

    Kubernetes' own documents and pod templates are validated with the schemas of the oldest and of a recent version.

    Raises:
        jsonschema.ValidationError: A field is not documented, or has an invalid value.
    """
    custom = _CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    spec = custom or {"type": "object"}
    schema = fields("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec)
    jsonschema.validate(manifest, schema)
    pod_template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
    for document in [manifest] if custom is None else [{**pod_template, "template": pod} for pod in pods(manifest)]:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def cluster_spec(manifest: Any) -> Any:
    """Return the cluster's specification in a RayJob or a RayCluster."""
    return manifest["spec"]["rayClusterSpec"] if manifest["kind"] == "RayJob" else manifest["spec"]


def pods(manifest: Any) -> list[Any]:
    """Return the pod templates of a RayJob or a RayCluster; other documents have none."""
    if manifest["apiVersion"] != "ray.io/v1":
        return []
    spec = cluster_spec(manifest)
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*templates, submitter] if submitter else templates
