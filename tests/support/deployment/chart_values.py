"""Ways to deploy the chart that must render, lint and validate."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

DEPLOYMENTS: dict[str, Values] = {
    "default": {},
    "tp2-one-pod": {"gang": {"tensorParallelSize": 2}, "server": {"gpuMemoryUtilization": 0.85}},
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
    "two-drafters": {
        "drafter": {"path": "/models/assistant", "second": {"path": "/models/dflash"}},
        "gang": {"tensorParallelSize": 2},
    },
    "download-two-drafters": {
        "model": {"volume": {"type": "download", "download": {"repository": "google/gemma-4-31b-it"}}},
        "drafter": {
            "path": "/models/assistant",
            "repository": "google/gemma-4-31b-it-assistant",
            "second": {"path": "/models/dflash", "repository": "z-lab/gemma-4-31b-it-dflash", "revision": "v2"},
        },
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
        "server": {
            "maxModelLen": 32768,
            "kvMemory": "40GiB",
            "kvDtype": "fp8_e4m3",
            "numerics": "exact",
            "port": 9000,
            "extraArgs": ["--max-num-seqs=64"],
            "maxConnectionAgeSeconds": 3600,
        }
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
        "network": {
            "nccl": {"IB_HCA": "mlx5", "DEBUG": "INFO", "BUFFSIZE": 4194304},
            "rdma": {"resource": "rdma/hca_shared_devices_a"},
        },
    },
    "rdma-as-root": {"network": {"rdma": {"resource": "rdma/hca_shared_devices_a", "memlock": "root"}}},
    "host-network": {
        "worker": {"hostNetwork": True},
        "network": {"interface": "ens5"},
        "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]},
    },
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
    "grpc-route-to-tls": {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "backendTLS": {"caConfigMap": "authority"},
        },
        "tls": {"secretName": "server-tls", "serverName": "gemray.example"},
    },
    "openai": {"openai": {"enabled": True}},
    "openai-over-tls": {
        "openai": {
            "enabled": True,
            "replicas": 2,
            "port": 9000,
            "timeoutSeconds": 600,
            "tlsSecret": "http-tls",
            "extraArgs": ["--max-message-mib=4"],
            "service": {"type": "LoadBalancer", "port": 443},
            "ingress": {"enabled": True, "host": "api.example", "tlsSecret": "edge"},
        },
        "tls": {"secretName": "server-tls", "serverName": "gemray.example"},
        "apiToken": {"secretName": "api"},
    },
    "openai-with-mtls": {
        "openai": {"enabled": True},
        "tls": {"secretName": "server-tls", "serverName": "gemray.example", "clientAuth": True},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"role": "client"}}}]},
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
