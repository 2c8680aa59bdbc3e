"""The fields of KubeRay's and Kubernetes' documents that cluster/ may use, as JSON schemas that allow no other.

Written from KubeRay's API reference (docs/reference/api.md of ray-project/kuberay, version 1.6's fields) and Kubernetes' own, not
copied from the published CRDs: names, types, what is required and which words are allowed. What the reference leaves to an
expression on the server, such as which fields of a RayJob go together, is not checked here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
WORDS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
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
SELECTOR = fields(matchLabels=WORDS)
RESOURCES = fields(
    requests={"type": "object", "additionalProperties": QUANTITY},
    limits={"type": "object", "additionalProperties": QUANTITY},
)
SECRET_KEY = fields("name", "key", name=NAME, key=TEXT, optional=FLAG)
CONTAINER = fields(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=many(TEXT),
    args=many(TEXT),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG, readOnlyRootFilesystem=FLAG, capabilities=fields(drop=many(TEXT))
    ),
    ports=many(fields("containerPort", containerPort=COUNT, name={**NAME, "maxLength": 15}, protocol=TEXT)),
    env=many(fields("name", name=TEXT, value=TEXT, valueFrom=fields("secretKeyRef", secretKeyRef=SECRET_KEY))),
    resources=RESOURCES,
    volumeMounts=many(fields("name", "mountPath", name=NAME, mountPath=TEXT, subPath=TEXT, readOnly=FLAG)),
)
POD = fields(
    "spec",
    metadata=fields(labels=WORDS, annotations=WORDS),
    spec=fields(
        "containers",
        containers=many(CONTAINER),
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        serviceAccountName=NAME,
        automountServiceAccountToken=FLAG,
        nodeSelector=WORDS,
        securityContext=fields(
            runAsNonRoot=FLAG,
            runAsUser=COUNT,
            runAsGroup=COUNT,
            fsGroup=COUNT,
            seccompProfile=fields("type", type=one_of("RuntimeDefault", "Localhost", "Unconfined")),
        ),
        tolerations=many(
            fields(
                key=TEXT,
                operator=one_of("Exists", "Equal"),
                value=TEXT,
                effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
            )
        ),
        volumes=many(
            fields(
                "name",
                name=NAME,
                persistentVolumeClaim=fields("claimName", claimName=NAME, readOnly=FLAG),
                emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
            )
        ),
    ),
)
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
_PEERS = many(
    fields(
        podSelector=SELECTOR,
        namespaceSelector=SELECTOR,
        ipBlock=fields("cidr", cidr=TEXT, **{"except": many(TEXT)}),
    )
)
_PORTS = many(fields("port", protocol=one_of("TCP", "UDP", "SCTP"), port=COUNT))
NETWORK_SPEC = fields(
    "podSelector",
    podSelector=SELECTOR,
    policyTypes=many(one_of("Ingress", "Egress")),
    ingress=many(fields(**{"from": _PEERS}, ports=_PORTS)),
    egress=many(fields(to=_PEERS, ports=_PORTS)),
)
CLAIM_SPEC = fields(
    "accessModes",
    "resources",
    accessModes=many(one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")),
    storageClassName=TEXT,
    resources=RESOURCES,
)
MONITOR_SPEC = fields(
    "selector",
    "podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=many(fields(port=NAME, path=TEXT, interval=TEXT)),
)

DOCUMENTS: dict[tuple[str, str], Schema] = {
    key: fields("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec)
    for key, spec in {
        ("ray.io/v1", "RayJob"): JOB_SPEC,
        ("ray.io/v1", "RayCluster"): CLUSTER_SPEC,
        ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_SPEC,
        ("v1", "PersistentVolumeClaim"): CLAIM_SPEC,
        ("monitoring.coreos.com/v1", "PodMonitor"): MONITOR_SPEC,
    }.items()
}
"""Schema of a whole document, by apiVersion and kind."""
