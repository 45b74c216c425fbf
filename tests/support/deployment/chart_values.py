"""Ways to deploy the chart that must render, lint and validate; and values that it must refuse, with words it says."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

DEPLOYMENTS: dict[str, Values] = {
    "default": {},
    "tp2-one-pod": {"gang": {"tensorParallelSize": 2}},
    "tp8-whole-node": {"gang": {"tensorParallelSize": 8}},
    "tp16-two-hosts": {"gang": {"tensorParallelSize": 16, "multiHost": True}, "network": {"interface": "eth0"}},
    "tp2-two-hosts": {"gang": {"tensorParallelSize": 2, "maxGpusPerPod": 1, "multiHost": True}},
    "replicas": {"gang": {"replicas": 3}, "service": {"headless": True}},
    "router": {"server": {"replicas": 2}, "gang": {"replicas": 2, "tensorParallelSize": 2}},
    "router-that-scales": {"server": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}},
    "cpu": {"gang": {"device": "cpu", "tensorParallelSize": 2}, "server": {"dtype": "float32"}},
    "drafter": {"drafter": {"path": "/models/drafter", "draftTokens": 4}, "gang": {"tensorParallelSize": 2}},
    "dedicated-drafter": {
        "drafter": {"path": "/models/drafter", "method": "dflash", "placement": "dedicated"},
        "gang": {"tensorParallelSize": 2},
    },
    "dedicated-drafter-apart": {
        "drafter": {"path": "/models/drafter", "method": "dflash", "placement": "dedicated"},
        "gang": {"tensorParallelSize": 8, "replicas": 2},
    },
    "host-path": {"model": {"volume": {"type": "hostPath", "hostPath": {"path": "/data/models"}}}},
    "pvc-sub-path": {"model": {"volume": {"pvc": {"claimName": "weights", "subPath": "gemma/31b"}}}},
    "download": {
        "model": {
            "volume": {
                "type": "download",
                "download": {"repository": "google/gemma-4-31b-it", "size": "100Gi", "tokenSecret": "hub"},
            }
        }
    },
    "download-with-drafter": {
        "model": {"volume": {"type": "download", "download": {"repository": "google/gemma-4-31b-it"}}},
        "drafter": {"path": "/models/drafter", "repository": "google/gemma-4-31b-it-assistant"},
    },
    "tls": {"tls": {"secretName": "server-tls", "serverName": "gemray.example"}},
    "mtls-and-token": {
        "tls": {"secretName": "server-tls", "serverName": "gemray.example", "clientAuth": True},
        "apiToken": {"secretName": "api", "key": "bearer"},
    },
    "monitoring": {
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True},
            "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        },
        "server": {"logFormat": "json", "otlpTracesEndpoint": "http://collector.monitoring:4317"},
    },
    "closed-network": {
        "networkPolicy": {
            "clients": [{"podSelector": {"matchLabels": {"role": "client"}}}],
            "scrapers": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        }
    },
    "open-network": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "own-ray-token": {"ray": {"auth": {"existingSecret": "ray-token"}}},
    "no-ray-token": {"ray": {"auth": {"mode": "disabled"}}},
    "server-flags": {
        "server": {"maxModelLen": 32768, "kvMemory": "40GiB", "port": 9000, "extraArgs": ["--max-num-seqs=64"]}
    },
    "placed": {
        "image": {"repository": "registry.example/gemray", "tag": "1.2.3", "pullSecrets": ["pull"]},
        "priorityClassName": "serving",
        "worker": {
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            "runtimeClassName": "nvidia",
            "annotations": {"team": "serving"},
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "affinity": {"podAntiAffinity": {}},
        },
        "driver": {"tolerations": [{"operator": "Exists"}], "env": [{"name": "A", "value": "b"}]},
        "head": {"nodeSelector": {"pool": "cpu"}, "annotations": {"a": "b"}, "env": [{"name": "A", "value": "b"}]},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "download-once-per-node": {
        "model": {
            "volume": {
                "type": "download",
                "hostPath": {"path": "/data/models"},
                "download": {"repository": "google/gemma-4-31b-it", "keep": "node"},
            }
        }
    },
    "download-into-a-claim": {
        "model": {
            "volume": {
                "type": "download",
                "pvc": {"claimName": "models", "subPath": "gemma"},
                "download": {"repository": "google/gemma-4-31b-it", "keep": "claim"},
            }
        },
        "drafter": {"path": "/models/drafter", "repository": "google/gemma-4-31b-it-assistant"},
    },
    "gcs-fault-tolerance": {
        "ray": {
            "gcsFaultTolerance": {
                "enabled": True,
                "redisAddress": "redis.databases.svc:6379",
                "passwordSecret": "redis",
            }
        }
    },
    "existing-cluster": {"ray": {"existingCluster": "shared", "auth": {"existingSecret": "ray-token"}}},
    "rdma": {
        "gang": {"tensorParallelSize": 16, "multiHost": True},
        "network": {"nccl": {"IB_HCA": "mlx5", "DEBUG": "INFO"}, "rdma": {"resource": "rdma/hca_shared_devices_a"}},
    },
    "host-network": {"worker": {"hostNetwork": True}, "network": {"interface": "ens5"}},
    "extras": {
        part: {
            "labels": {"team": "serving"},
            "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
        }
        for part in ("head", "worker", "driver")
    },
    "grpc-route": {
        "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["gemray.example"]},
    },
    "ingress": {"ingress": {"enabled": True, "host": "gemray.example", "tlsSecret": "edge"}},
    "ingress-to-tls": {
        "ingress": {"enabled": True, "host": "gemray.example", "annotations": {"a": "b"}},
        "tls": {"secretName": "server-tls", "serverName": "gemray.example"},
    },
    "hpa": {"autoscaling": {"enabled": True, "minReplicas": 2}},
    "keda": {"autoscaling": {"enabled": True, "kind": "keda", "prometheusAddress": "http://prometheus:9090"}},
    "triton-cache-claim": {"tritonCache": {"type": "pvc", "pvc": {"claimName": "kernels"}}},
    "triton-cache-node": {"tritonCache": {"type": "hostPath", "hostPath": {"path": "/var/cache/gemray"}}},
    "no-triton-cache": {"tritonCache": {"type": "none"}},
    "quantities": {
        "server": {"kvMemory": "40Gi"},
        "ray": {"objectStoreMemory": "0.5Gi"},
        "shm": {"worker": 8589934592},
        "driver": {"resources": {"requests": {"cpu": 0.5, "memory": "2Gi"}, "limits": {"cpu": 2, "memory": "2Gi"}}},
    },
    "digest": {"image": {"repository": "registry.example/gemray", "digest": f"sha256:{'0' * 64}"}},
    "cpu-by-itself": {"gang": {"device": "cpu"}},
}

REFUSALS: dict[str, tuple[Values, str]] = {
    "half-a-gpu": ({"gang": {"tensorParallelSize": 0.5}}, "tensorParallelSize"),
    "half-a-gpu-by-hand": ({"worker": {"resources": {"limits": {"nvidia.com/gpu": 0.5}}}}, "nvidia.com/gpu"),
    "half-a-gpu-per-pod": ({"gang": {"maxGpusPerPod": 1.5}}, "maxGpusPerPod"),
    "no-gpu": ({"gang": {"tensorParallelSize": 0}}, "tensorParallelSize"),
    "three-ranks": ({"gang": {"tensorParallelSize": 3}}, "tensorParallelSize"),
    "tp-larger-than-a-pod": ({"gang": {"tensorParallelSize": 16}}, "set gang.multiHost"),
    "tp-larger-than-a-small-pod": ({"gang": {"tensorParallelSize": 4, "maxGpusPerPod": 2}}, "tensorParallelSize"),
    "fewer-replicas-than-kept": ({"server": {"replicas": 1, "minReplicas": 2}}, "server.minReplicas 2 is more"),
    "more-replicas-than-most": ({"server": {"replicas": 3, "maxReplicas": 2}}, "server.maxReplicas 2 is less"),
    "scales-by-half-gangs": (
        {"server": {"maxReplicas": 2}, "gang": {"tensorParallelSize": 2, "maxGpusPerPod": 1, "multiHost": True}},
        "need gangs of one pod",
    ),
    "traces-to-no-url": ({"server": {"otlpTracesEndpoint": "collector:4317"}}, "otlpTracesEndpoint"),
    "unknown-key": ({"tensorParallelSize": 2}, "tensorParallelSize"),
    "unknown-nested-key": ({"gang": {"gpus": 2}}, "gpus"),
    "unknown-probe-key": ({"probes": {"liveness": {"path": "/healthz"}}}, "path"),
    "text-for-a-number": ({"server": {"port": "grpc"}}, "port"),
    "no-such-port": ({"server": {"port": 70000}}, "port"),
    "unknown-dtype": ({"server": {"dtype": "float16"}}, "dtype"),
    "kv-memory-of-no-unit": ({"server": {"kvMemory": "40"}}, "has no unit: write it as 40Gi"),
    "unknown-volume": ({"model": {"volume": {"type": "nfs"}}}, "type"),
    "pvc-without-a-name": ({"model": {"volume": {"pvc": {"claimName": ""}}}}, "claimName must name"),
    "host-path-without-a-path": ({"model": {"volume": {"type": "hostPath"}}}, "must be an absolute path"),
    "download-of-nothing": ({"model": {"volume": {"type": "download"}}}, "must say OWNER/NAME"),
    "relative-model-path": ({"model": {"path": "models/target"}}, "path"),
    "model-outside-the-volume": ({"model": {"path": "/elsewhere/target"}}, "model.path"),
    "drafter-outside-the-volume": ({"drafter": {"path": "/elsewhere/drafter"}}, "drafter.path"),
    "drafter-from-nowhere": (
        {
            "drafter": {"path": "/models/drafter"},
            "model": {"volume": {"type": "download", "download": {"repository": "google/gemma-4-31b-it"}}},
        },
        "drafter.repository",
    ),
    "unknown-method": ({"drafter": {"method": "eagle"}}, "method"),
    "download-onto-the-mount": (
        {
            "model": {
                "path": "/models",
                "volume": {"type": "download", "download": {"repository": "google/gemma-4-31b-it"}},
            }
        },
        "model.path",
    ),
    "client-certificates-without-tls": ({"tls": {"clientAuth": True}}, "tls.clientAuth"),
    "tls-without-a-name": ({"tls": {"secretName": "server-tls"}}, "serverName must be a DNS name"),
    "shm-without-a-unit": ({"shm": {"worker": "a lot"}}, 'shm.worker "a lot" is not an amount of bytes'),
    "a-ray-without-token-auth": ({"ray": {"version": "2.40.0"}}, "version"),
    "no-probe": ({"probes": {"startup": None}}, "startup"),
    "digest-of-nothing": ({"image": {"digest": "1.2.3"}}, "digest"),
    "more-errors-than-requests": ({"metrics": {"alerts": {"errorRatio": 5}}}, "errorRatio"),
    "bfloat16-on-cpus": ({"gang": {"device": "cpu"}, "server": {"dtype": "bfloat16"}}, "use auto, float32"),
    "object-store-too-small": ({"ray": {"objectStoreMemory": "10Mi"}}, "less than the 75Mi"),
    "object-store-in-words": ({"ray": {"objectStoreMemory": "a lot"}}, "is not an amount of bytes"),
    "budget-in-percent": ({"podDisruptionBudget": {"maxUnavailable": "50%"}}, "maxUnavailable"),
    "redis-from-nowhere": ({"ray": {"gcsFaultTolerance": {"enabled": True}}}, "redisAddress must be HOST:PORT"),
    "route-without-a-gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs must name"),
    "ingress-without-a-host": ({"ingress": {"enabled": True}}, "ingress.host must be"),
    "fewer-at-most-than-at-least": ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "more than autoscaling.max"),
    "half-a-gang-at-a-time": (
        {"autoscaling": {"enabled": True}, "gang": {"tensorParallelSize": 16, "multiHost": True}},
        "gangs of one pod",
    ),
    "keda-without-prometheus": ({"autoscaling": {"enabled": True, "kind": "keda"}}, "prometheusAddress must be"),
    "a-metric-that-is-none": ({"autoscaling": {"metric": "gemray_load"}}, "metric"),
    "nccl-with-its-prefix": ({"network": {"nccl": {"NCCL_DEBUG": "INFO"}}}, "without its prefix NCCL_"),
    "triton-cache-nowhere": ({"tritonCache": {"type": "pvc"}}, "tritonCache.pvc.claimName must name"),
    "download-kept-on-no-node": (
        {"model": {"volume": {"type": "download", "download": {"repository": "a/b", "keep": "node"}}}},
        "hostPath.path",
    ),
}
