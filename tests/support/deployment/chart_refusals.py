"""Values that the chart must refuse, with words that it says."""

from __future__ import annotations

from support.deployment.chart_values import Values

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
    "kv-memory-of-no-unit": ({"server": {"kvMemory": "40"}}, "has no unit: write it as 40Gi, 40GiB or 500M, or auto"),
    "unknown-volume": ({"model": {"volume": {"type": "nfs"}}}, "type"),
    "pvc-without-a-name": ({"model": {"volume": {"pvc": {"claimName": ""}}}}, "claimName must name"),
    **{
        f"ten-million-{part}-{name}": ({part: {name: 10_000_000}}, f"/{part}/{name}")
        for part, name in (("gang", "replicas"), ("server", "maxReplicas"), ("autoscaling", "maxReplicas"))
    },
    "ten-million-tries": ({"probes": {"startup": {"failureThreshold": 10_000_000}}}, "failureThreshold"),
    "a-secret-of-two-words": ({"image": {"pullSecrets": ["pull secret"]}}, "pullSecrets"),
    "a-class-in-capitals": ({"priorityClassName": "High"}, "priorityClassName"),
    "a-key-of-two-words": ({"apiToken": {"secretName": "api", "key": "a token"}}, "key"),
    **{
        f"sub-path-{path!r}": (
            {"model": {"volume": {"pvc": {"subPath": path}}}},
            f'model.volume.pvc.subPath "{path}" must be a directory within the claim',
        )
        for path in ("/gemma", "a/../../b", "two words")
    },
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
    "no-port": ({"openai": {"port": None}}, "port"),
    "no-resources": ({"worker": {"resources": None}}, "resources"),
    "no-probe": ({"probes": {"startup": None}}, "startup"),
    "digest-of-nothing": ({"image": {"digest": "1.2.3"}}, "digest"),
    "more-errors-than-requests": ({"metrics": {"alerts": {"errorRatio": 5}}}, "errorRatio"),
    "bfloat16-on-cpus": ({"gang": {"device": "cpu"}, "server": {"dtype": "bfloat16"}}, "use auto, float32"),
    "object-store-too-small": ({"ray": {"objectStoreMemory": "10Mi"}}, "less than the 75Mi"),
    "object-store-in-words": ({"ray": {"objectStoreMemory": "a lot"}}, "is not an amount of bytes"),
    "budget-in-percent": ({"podDisruptionBudget": {"maxUnavailable": "50%"}}, "maxUnavailable"),
    "redis-from-nowhere": ({"ray": {"gcsFaultTolerance": {"enabled": True}}}, "redisAddress must be HOST:PORT"),
    **{
        f"redis-at-{address!r}": (
            {"ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": address}}},
            "is not HOST:PORT",
        )
        for address in ("r", "a b", "r:abc", "r:0", "r:70000", ":6379")
    },
    "rdma-that-is-a-gpu": ({"network": {"rdma": {"resource": "nvidia.com/gpu"}}}, "nvidia.com/gpu is no RDMA device"),
    "rdma-for-cpus": (
        {"gang": {"device": "cpu"}, "network": {"rdma": {"resource": "rdma/hca_shared_devices_a"}}},
        "does not fit gang.device cpu",
    ),
    "kv-memory-above-the-memory": (
        {"gang": {"device": "cpu", "tensorParallelSize": 2}, "server": {"kvMemory": "40 GiB"}},
        "server.kvMemory 40 GiB for each of the 2 rank(s) in a pod is more than worker.resources.limits.memory 64Gi",
    ),
    "a-notice-beyond-the-grace": (
        {"server": {"extraArgs": ["--drain-notice-s=46"]}},
        "has --drain-notice-s 46, but server.terminationGracePeriodSeconds 60 leaves at most 45 for it",
    ),
    "an-end-beyond-the-grace": (
        {"server": {"extraArgs": ["--page-size=16", "--stop-deadline-s", "55.5"]}},
        "has --stop-deadline-s 55.5, but server.terminationGracePeriodSeconds 60 leaves at most 55 for it",
    ),
    "mtp-without-a-drafter": ({"drafter": {"method": "mtp"}}, "drafter.method mtp needs drafter.path"),
    "dflash-without-a-drafter": ({"drafter": {"method": "dflash"}}, "drafter.method dflash needs drafter.path"),
    "a-protocol-of-no-name": ({"service": {"appProtocol": "h3"}}, "appProtocol"),
    "a-tls-protocol-without-tls": ({"service": {"appProtocol": "https"}}, "appProtocol https needs tls.secretName"),
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
    "one-port-for-two": ({"server": {"port": 9400}}, "server.port and metrics.port are both 9400"),
    "two-ports-of-one-service": ({"service": {"port": 9400}}, "service.port and metrics.port are both 9400"),
    "a-port-of-ray": ({"server": {"port": 52365}}, "server.port 52365 is a port that Ray takes"),
    "a-port-of-rays-workers": ({"metrics": {"port": 10002}}, "metrics.port 10002 is a port that Ray takes"),
    "a-port-for-root": ({"server": {"port": 443}}, "port"),
    "pre-stop-outlasts-the-pod": (
        {"server": {"preStopSeconds": 51}},
        "server.preStopSeconds 51 does not fit server.terminationGracePeriodSeconds 60: 10 of these are kept for the "
        "end of the driver, so at most 50",
    ),
    "drain-outlasts-the-start": (
        {"server": {"terminationGracePeriodSeconds": 3600}},
        "server.startTimeoutSeconds 900 is less than server.terminationGracePeriodSeconds 3600",
    ),
    "start-outlasts-its-probe": (
        {"server": {"startTimeoutSeconds": 3600}},
        "probes.startup allows 1800 s (periodSeconds 10 times failureThreshold 180), less than",
    ),
    "a-flag-against-a-value": (
        {"server": {"extraArgs": ["--tp=4"]}},
        "server.extraArgs has --tp, which follows from gang.tensorParallelSize: set that instead",
    ),
    "a-flag-in-two-words": ({"server": {"extraArgs": ["--port", "1"]}}, "which follows from server.port"),
    "a-flag-twice": ({"server": {"extraArgs": ["--page-size=16", "--page-size=32"]}}, "has --page-size twice"),
    "a-drafter-by-flag": ({"server": {"extraArgs": ["--drafter=/models/drafter"]}}, "follows from drafter.path and"),
    "a-flag-against-the-gateway": (
        {"openai": {"extraArgs": ["--host=127.0.0.1"]}},
        "openai.extraArgs has --host, which follows from the Service",
    ),
    "shm-of-nothing": ({"shm": {"worker": "0Gi"}}, "shm.worker 0Gi is nothing"),
    "cache-of-nothing": ({"tritonCache": {"size": 0}}, "tritonCache.size 0 is nothing"),
    "a-share-and-a-size": (
        {"server": {"kvMemory": "40Gi", "gpuMemoryUtilization": 0.8}},
        "server.gpuMemoryUtilization 0.8 has no effect on server.kvMemory 40Gi",
    ),
    "kv-memory-of-nothing": ({"server": {"kvMemory": "0GiB"}}, "server.kvMemory 0GiB holds no token"),
    "shm-above-the-memory": (
        {"shm": {"worker": "128Gi"}},
        "shm.worker 128Gi is more than worker.resources.limits.memory 64Gi",
    ),
    "object-store-above-shm": (
        {"ray": {"objectStoreMemory": "2Gi"}},
        "ray.objectStoreMemory 2Gi is more than shm.driver 1Gi",
    ),
    "memory-in-words": (
        {"worker": {"resources": {"limits": {"memory": "64 GB"}}}},
        'worker.resources.limits.memory "64 GB" is not a quantity of Kubernetes',
    ),
    "requests-above-limits": (
        {"driver": {"resources": {"requests": {"cpu": "4500m"}}}},
        "driver.resources.requests.cpu 4500m is more than its limit 4",
    ),
    "a-variable-twice": (
        {"driver": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "driver.env sets A twice, or the chart sets it already",
    ),
    "a-variable-of-the-chart": ({"worker": {"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}}, "worker.env sets HF_"),
    "a-variable-of-nccl-twice": (
        {
            "network": {"nccl": {"DEBUG": "INFO"}},
            "head": {"env": []},
            "driver": {"env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
        },
        "driver.env sets NCCL_DEBUG twice",
    ),
    "a-volume-of-the-chart": (
        {"worker": {"extraVolumes": [{"name": "model", "emptyDir": {}}]}},
        'worker.extraVolumes has the name "model" twice, or the chart has a volume of that name',
    ),
    "a-mount-of-nothing": (
        {"head": {"extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}},
        'head.extraVolumeMounts mounts "scratch", which is no volume of the pod',
    ),
    "a-mount-over-the-chart's": (
        {"driver": {"extraVolumeMounts": [{"name": "tmp", "mountPath": "/dev/shm/"}]}},
        "driver.extraVolumeMounts has the path /dev/shm/ twice, or the chart mounts a volume there",
    ),
    "a-label-of-the-operator": (
        {"worker": {"labels": {"app.kubernetes.io/name": "gemray"}}},
        "worker.labels must not set app.kubernetes.io/name",
    ),
    "a-label-with-a-space": ({"driver": {"labels": {"team": "the team"}}}, "team"),
    "the-model-as-its-drafter": ({"drafter": {"path": "/models/target/"}}, "is model.path as well"),
    "a-gpu-for-no-drafter": ({"drafter": {"placement": "dedicated"}}, "dedicated needs drafter.path"),
    "a-gpu-for-an-assistant": (
        {"drafter": {"path": "/models/drafter", "method": "mtp", "placement": "dedicated"}},
        "dedicated does not fit drafter.method mtp",
    ),
    "a-second-drafter-alone": ({"drafter": {"second": {"path": "/models/dflash"}}}, "needs drafter.path"),
    "a-second-drafter-taken-away": ({"drafter": {"second": None}}, "second"),
    "one-drafter-twice": (
        {"drafter": {"path": "/models/drafter", "second": {"path": "/models/drafter/"}}},
        'drafter.second.path "/models/drafter/" is drafter.path as well',
    ),
    "the-model-as-its-second-drafter": (
        {"drafter": {"path": "/models/drafter", "second": {"path": "/models/target"}}},
        'drafter.second.path "/models/target" is model.path as well',
    ),
    "one-drafter-by-another-way": (
        {"drafter": {"path": "/models/drafter", "second": {"path": "/models/./old/../drafter"}}},
        'drafter.second.path "/models/./old/../drafter" is drafter.path as well',
    ),
    "one-download-for-both-drafters": (
        {
            "model": {"volume": {"type": "download", "download": {"repository": "a/b"}}},
            "drafter": {
                "path": "/models/drafter",
                "repository": "a/c",
                "second": {"path": "/models/dflash", "repository": "a/c"},
            },
        },
        'drafter.second.repository "a/c" at revision "main" is what drafter.repository names as well',
    ),
    "the-model's-download-as-its-drafter": (
        {
            "model": {"volume": {"type": "download", "download": {"repository": "a/b"}}},
            "drafter": {"path": "/models/drafter", "repository": "a/b"},
        },
        'drafter.repository "a/b" at revision "main" is what model.volume.download brings as well',
    ),
    "a-model-out-of-the-volume-by-dots": (
        {"model": {"path": "/models/../target"}},
        'model.path "/models/../target" is not under model.volume.mountPath "/models"',
    ),
    "a-drafter-out-of-the-volume-by-dots": (
        {"drafter": {"path": "/models/../drafter"}},
        'drafter.path "/models/../drafter" is not under',
    ),
    "a-download-onto-the-mount-by-dots": (
        {"model": {"path": "/models/a/..", "volume": {"type": "download", "download": {"repository": "a/b"}}}},
        "model.path must be a directory below",
    ),
    "a-mount-at-the-root-by-dots": (
        {"model": {"path": "/models/target", "volume": {"mountPath": "/models/.."}}},
        'model.volume.mountPath "/models/.." is the root',
    ),
    "a-second-drafter-outside-the-volume": (
        {"drafter": {"path": "/models/drafter", "second": {"path": "/elsewhere/dflash"}}},
        'drafter.second.path "/elsewhere/dflash" is not under',
    ),
    "a-second-drafter-from-nowhere": (
        {
            "model": {"volume": {"type": "download", "download": {"repository": "a/b"}}},
            "drafter": {"path": "/models/drafter", "repository": "a/c", "second": {"path": "/models/dflash"}},
        },
        "drafter.second.repository must say where",
    ),
    "a-gpu-for-one-of-two-drafters": (
        {
            "drafter": {"path": "/models/drafter", "placement": "dedicated", "second": {"path": "/models/dflash"}},
        },
        "dedicated does not fit drafter.second.path",
    ),
    "one-method-for-two-drafters": (
        {"drafter": {"path": "/models/drafter", "method": "mtp", "second": {"path": "/models/dflash"}}},
        "drafter.method mtp does not fit drafter.second.path",
    ),
    "a-second-drafter-by-flag": (
        {"drafter": {"path": "/models/drafter"}, "server": {"extraArgs": ["--drafter=/models/dflash"]}},
        "follows from drafter.path and drafter.second.path",
    ),
    "a-mount-at-the-root": ({"model": {"path": "/target", "volume": {"mountPath": "/"}}}, "mountPath"),
    "an-image-with-its-tag": ({"image": {"repository": "registry:5000/gemray:1.0"}}, "put that into image.tag"),
    "a-name-of-no-service": ({"nameOverride": "Gemray"}, "nameOverride"),
    "hosts-unknown-to-the-policy": (
        {"worker": {"hostNetwork": True}},
        "worker.hostNetwork needs networkPolicy.nodeCIDRs",
    ),
    "an-interface-in-gloo's-way": ({"network": {"interface": "^lo,docker"}}, "interface"),
    "a-balancer-without-an-address": (
        {"service": {"type": "LoadBalancer", "headless": True}},
        "service.headless does not fit service.type LoadBalancer",
    ),
    "a-gateway-that-trusts-nobody": (
        {
            "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]},
            "tls": {"secretName": "server-tls", "serverName": "gemray.example"},
        },
        "gateway.backendTLS must say whom the Gateway trusts",
    ),
    "a-host-with-its-scheme": ({"ingress": {"enabled": True, "host": "https://gemray.example"}}, "host"),
    "an-ingress-to-no-gateway": ({"openai": {"ingress": {"enabled": True}}}, "openai.ingress needs openai.enabled"),
    "one-host-for-two": (
        {
            "ingress": {"enabled": True, "host": "a.example"},
            "openai": {"enabled": True, "ingress": {"enabled": True, "host": "a.example"}},
        },
        "openai.ingress.host a.example is ingress.host as well",
    ),
    "longer-than-an-hpa-looks-back": ({"autoscaling": {"scaleDownSeconds": 7200}}, "scaleDownSeconds"),
    "download-kept-on-no-node": (
        {"model": {"volume": {"type": "download", "download": {"repository": "a/b", "keep": "node"}}}},
        "hostPath.path",
    ),
}
