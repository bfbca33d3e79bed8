"""JobSet v1alpha2 as a JSON schema, as much of it as launch/gke.py writes, and nothing else.

From the API's Go types: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go (JobSetSpec, ReplicatedJob, DependsOn,
Network, SuccessPolicy, FailurePolicy), and Kubernetes' batch/v1 JobSpec and core/v1 PodSpec, Container and Probe.
"""

TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
LABEL = {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def mapping(required: dict, **optional) -> dict:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: dict, **more) -> dict:
    return {"type": "array", "items": items, "minItems": 1} | more


PROBE = mapping(
    {
        "httpGet": mapping({"path": TEXT, "port": NUMBER}),
        "periodSeconds": NUMBER,
        "timeoutSeconds": NUMBER,
    },
    failureThreshold={"type": "integer", "minimum": 1},
)
FIELD = mapping({"fieldRef": mapping({"fieldPath": TEXT})})
CONTAINER = mapping(
    {
        "name": LABEL,
        "image": TEXT,
        "command": listed(TEXT),
        "env": listed(
            {
                "oneOf": [
                    mapping({"name": TEXT, "value": TEXT}),
                    mapping({"name": TEXT, "valueFrom": FIELD}),
                ]
            }
        ),
        "volumeMounts": listed(mapping({"name": LABEL, "mountPath": TEXT})),
    },
    ports=listed(mapping({"containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}})),
    resources=mapping(
        {},
        requests=mapping({}, cpu=NUMBER, memory={"type": "string", "pattern": "^[0-9]+Gi$"}),
        limits={"type": "object", "additionalProperties": NUMBER},
    ),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
)
POD = mapping(
    {
        "restartPolicy": {"enum": ["Never", "OnFailure"]},  # of a job's pods
        "terminationGracePeriodSeconds": NUMBER,
        "containers": listed(CONTAINER),
        "volumes": listed(
            {
                "oneOf": [
                    mapping({"name": LABEL, "persistentVolumeClaim": mapping({"claimName": TEXT})}),
                    mapping({"name": LABEL, "hostPath": mapping({"path": TEXT})}),
                    mapping({"name": LABEL, "emptyDir": mapping({"medium": {"const": "Memory"}})}),
                ]
            }
        ),
    },
    nodeSelector=TEXTS,
)
FAILED_PODS = {
    "oneOf": [
        mapping(
            {
                "action": {"enum": ["FailJob", "Ignore", "Count"]},
                "onExitCodes": mapping(
                    {
                        "containerName": LABEL,
                        "operator": {"enum": ["In", "NotIn"]},
                        "values": listed({"type": "integer", "minimum": 1, "maximum": 255}),
                    }
                ),
            }
        ),
        mapping(
            {
                "action": {"enum": ["FailJob", "Ignore", "Count"]},
                "onPodConditions": listed(
                    mapping({"type": TEXT, "status": {"enum": ["True", "False", "Unknown"]}})
                ),
            }
        ),
    ]
}
JOB = mapping(
    {
        "parallelism": NUMBER,
        "completions": NUMBER,
        "completionMode": {"const": "Indexed"},
        "backoffLimit": NUMBER,
        "template": mapping({"spec": POD}, metadata=mapping({"annotations": TEXTS})),
    },
    podFailurePolicy=mapping({"rules": listed(FAILED_PODS, maxItems=20)}),
)
FAILED_JOBS = mapping(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
        "onJobFailureReasons": listed(
            {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]}
        ),
    }
)
SCHEMA = mapping(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": mapping({"name": LABEL}),
        "spec": mapping(
            {
                "replicatedJobs": listed(
                    mapping(
                        {
                            "name": LABEL,
                            "replicas": {"type": "integer", "minimum": 1},
                            "template": mapping(
                                {"spec": JOB}, metadata=mapping({"annotations": TEXTS})
                            ),
                        },
                        # Older versions take no more than one.
                        dependsOn=listed(
                            mapping({"name": LABEL, "status": {"enum": ["Ready", "Complete"]}}),
                            maxItems=1,
                        ),
                    )
                ),
                "network": mapping(
                    {
                        "enableDNSHostnames": {"const": True},
                        "subdomain": LABEL,
                        "publishNotReadyAddresses": {"type": "boolean"},
                    }
                ),
                "failurePolicy": mapping({"maxRestarts": NUMBER}, rules=listed(FAILED_JOBS)),
            },
            successPolicy=mapping(
                {"operator": {"enum": ["All", "Any"]}, "targetReplicatedJobs": listed(LABEL)}
            ),
        ),
    }
)
