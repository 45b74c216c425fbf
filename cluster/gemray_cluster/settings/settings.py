"""Settings of `gemray serve`: flags, GEMRAY_* variables and a TOML file, all with the same names.

A flag wins over a variable, a variable over the file, the file over the default. Errors say which of them it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.settings.errors import InvalidSetting, MissingSetting
from gemray_cluster.settings.sources import CONFIG, from_environment, from_file, from_flags, parse
from gemray_cluster.settings.types import (
    AUTO,
    INTEGER,
    INTEGER_OR_AUTO,
    MODEL,
    MODELS,
    NUMBER,
    PATH,
    SECONDS,
    SIZE,
    SIZE_OR_AUTO,
    SWITCH,
    TEXT,
    Kind,
    one_of,
)
from gemray_workers.errors import GemrayError, InvalidField

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName, EngineConfig
    from gemray_workers.rank.blueprint import Blueprint

T = TypeVar("T")

ENGINE_NAMES: Mapping[str, str] = {
    "model_path": "model",
    "tensor_parallel_size": "tp",
    "kv_memory_bytes": "kv_memory",
    "drafter_path": "drafter",
    "second_drafter_path": "drafter",
    "num_draft_tokens": "draft_tokens",
}
"""Fields of EngineConfig whose settings have shorter names."""

DEFAULT_DTYPE: Mapping[str, str] = {"cpu": "float32", "cuda": "bfloat16"}


def _setting(kind: Kind[Any], panel: str, meaning: str, default: Any, bounds: str) -> Any:
    """A setting; `bounds` are its range in words, which the config behind it checks (tests hold both equal)."""
    told = f"{meaning.removesuffix('.')}; {bounds}." if bounds else meaning
    return field(default=default, metadata={"kind": kind, "panel": panel, "help": told, "bounds": bounds})


def _engine(kind: Kind[Any], meaning: str, default: Any = None, bounds: str = "") -> Any:
    return _setting(kind, "Model and engine", meaning, default, bounds)


def _cluster(kind: Kind[Any], meaning: str, bounds: str = "") -> Any:
    return _setting(kind, "Cluster", meaning, None, bounds)


def _server(kind: Kind[Any], meaning: str, bounds: str = "") -> Any:
    return _setting(kind, "Server", meaning, None, bounds)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything that `gemray serve` can be told. None leaves a value to the part that uses it."""

    model: str = _engine(
        MODEL,
        "A local Hugging Face directory of a Gemma 4 model; ORG/NAME or ORG/NAME@REVISION in the local Hugging Face "
        "cache; or gemray-tiny, which ships with gemray.",
        MISSING,
    )
    tp: int = _engine(INTEGER, "Ranks that the model is sharded over.", 1, bounds=">= 1")
    random_weights: bool = _engine(
        SWITCH, "Weights from a seed instead of the checkpoint's: config and tokenizer are enough.", False
    )
    device: str = _engine(one_of("auto", "cpu", "cuda"), "auto takes GPUs if the cluster has any.", "auto")
    dtype: str = _engine(
        one_of("auto", "bfloat16", "float32", "float64"), "auto is bfloat16 on GPUs, float32 on CPUs.", "auto"
    )
    numerics: str | None = _engine(
        one_of("fast", "exact"),
        "exact: the same request has the same tokens whatever the batch, the drafter and the ranks, to the bit; fast: "
        "in bfloat16 tokens may differ at near ties (default fast).",
    )
    kv_memory: int | str = _engine(
        SIZE_OR_AUTO,
        "KV pages of each rank, in all; auto (the default): on GPUs what is free once weights, work space and graphs "
        "have their memory, less a headroom; on CPUs a quarter of what is free.",
        AUTO,
        bounds=">= 1",
    )
    gpu_memory_utilization: float | None = _engine(
        NUMBER,
        "With kv-memory auto: the part of a GPU's memory that a rank may take in all (default 0.9).",
        bounds="> 0 and <= 1",
    )
    kv_dtype: str | None = _engine(
        one_of("auto", "fp8_e4m3"),
        "What KV pages hold: auto is the model's dtype, fp8_e4m3 8-bit floats times the checkpoint's scales or 1 "
        "(default auto).",
    )
    max_model_len: int | None = _engine(
        INTEGER, "Most tokens of a request, prompt and output; cut to what fits.", bounds=">= 2"
    )
    max_num_seqs: int | None = _engine(INTEGER, "Requests that run at one time (default 32).", bounds=">= 1")
    max_step_tokens: int | None = _engine(
        INTEGER,
        "Rows of one forward pass (default 512, or more where a prompt chunk and drafts ask for it).",
        bounds=">= 1",
    )
    prefill_chunk: int | None = _engine(
        INTEGER,
        "Most prompt rows of one request in a step (default 256, on GPUs up to 1024: what takes about 25 ms).",
        bounds=">= 1",
    )
    page_size: int | None = _engine(INTEGER, "Tokens of a KV page (default 16).", bounds=">= 1")
    attention_backend: str | None = _engine(
        TEXT, "Attention kernels of the target; an explicit choice is never replaced (default: chosen)."
    )
    drafter: tuple[str, ...] = _engine(
        MODELS,
        "An MTP assistant or a DFlash drafter: a local directory, ORG/NAME in the cache, or an embedded one's name; "
        "given twice, one of each (default: none).",
        (),
    )
    method: str | None = _engine(
        one_of("auto", "none", "mtp", "dflash"), "How drafts are made (default auto: what the drafter's config says)."
    )
    draft_tokens: int | str = _engine(
        INTEGER_OR_AUTO,
        "Drafts of a request in a step, 0 for none; auto (the default): as many as measured acceptance and step times "
        "justify, at most 4 with MTP or a whole block with DFlash.",
        AUTO,
        bounds=">= 0",
    )
    drafter_placement: str | None = _engine(
        one_of("colocated", "dedicated"), "dedicated gives a DFlash drafter a rank of its own (default colocated)."
    )
    mtp_position_delta: int | None = _engine(
        INTEGER,
        "Where MTP drafts stand: at the newest token's position (default 0) or at the one before (-1).",
        bounds="-1 or 0",
    )
    dflash_input_scale: float | None = _engine(
        NUMBER,
        "Multiplies the embeddings of a DFlash block (default: the checkpoint's, else the target's scale).",
        bounds="> 0",
    )
    dflash_causal: str | None = _engine(
        one_of("config", "sliding", "all", "none"),
        "DFlash layers whose block rows see only those before them (default config: the checkpoint's, else sliding).",
    )
    drafter_attention_backend: str | None = _engine(
        TEXT, "Attention of a drafter with a KV cache of its own (default: chosen)."
    )
    enforce_eager: bool = _engine(
        SWITCH, "On GPUs, run cycles kernel by kernel instead of as CUDA graphs captured at start.", False
    )
    prefix_cache: bool = _engine(
        SWITCH, "Do not compute the beginning of a prompt again whose KV is still in memory (on by default).", True
    )
    lag: int | None = _engine(
        INTEGER,
        "Steps in flight while the next is planned: 1, so that devices never wait, or 0 (default 1).",
        bounds="0 or 1",
    )
    collective_timeout_s: float | None = _engine(
        SECONDS, "How long a rank waits for its peers (default 60).", bounds="> 0"
    )

    address: str | None = _cluster(TEXT, "A running Ray cluster, HOST:PORT or auto (default: start Ray here).")
    namespace: str | None = _cluster(TEXT, "Ray namespace of the gang (default gemray).")
    strategy: str | None = _cluster(TEXT, "How ranks spread over nodes, in Ray's terms (default auto).")
    local_num_cpus: int | None = _cluster(
        INTEGER, "CPUs of a Ray started here (default: what the ranks reserve, at most the cores).", bounds=">= 1"
    )
    local_num_gpus: int | None = _cluster(INTEGER, "GPUs of a Ray started here (default: those found).", bounds=">= 0")
    cpus_per_rank: int | None = _cluster(INTEGER, "CPUs that a rank reserves (default 1).", bounds=">= 1")
    threads_per_rank: int | None = _cluster(
        INTEGER, "Threads of a rank's CPU operations (default: a fair share).", bounds=">= 1"
    )
    connect_deadline_s: float | None = _cluster(
        SECONDS, "Deadline for reaching the Ray cluster (default 30).", bounds="> 0"
    )
    placement_deadline_s: float | None = _cluster(SECONDS, "Deadline for free resources (default 120).", bounds="> 0")
    start_deadline_s: float | None = _cluster(SECONDS, "Deadline from placement to ready (default 900).", bounds="> 0")
    heartbeat_deadline_s: float | None = _cluster(
        SECONDS, "Silence after which a gang counts as hung (default 30).", bounds="> 0"
    )
    stop_deadline_s: float | None = _cluster(
        SECONDS, "Deadline for the ranks to end in order (default 10).", bounds="> 0"
    )
    max_rebuilds: int | None = _cluster(
        INTEGER,
        "Times within 5 minutes that a failed gang is rebuilt and its requests go on (default 3; 0: never).",
        bounds=">= 0",
    )

    replicas: int | None = _cluster(
        INTEGER, "Gangs that serve the model side by side, at start (default min-replicas).", bounds=">= 1"
    )
    min_replicas: int | None = _cluster(
        INTEGER, "Replicas that are always kept (default replicas, or 1).", bounds=">= 1"
    )
    max_replicas: int | None = _cluster(
        INTEGER,
        "Most replicas: more are started when requests wait and the cluster has or gets the room (default replicas).",
        bounds=">= 1",
    )
    scale_up_s: float | None = _cluster(
        SECONDS, "How long requests must have waited before another replica is started (default 10).", bounds="> 0"
    )
    scale_down_s: float | None = _cluster(
        SECONDS, "How long one replica less must have sufficed before one is ended (default 300).", bounds="> 0"
    )

    served_model_name: str | None = _server(
        TEXT, "What clients and metrics call the model (default: ORG/NAME, or the directory's name)."
    )
    host: str | None = _server(TEXT, "Address to listen on (default 127.0.0.1).")
    port: int | None = _server(INTEGER, "gRPC port, 0 for a free one (default 50051).", bounds="0..65535")
    metrics_port: int | None = _server(
        INTEGER, "Prometheus port on the same address, 0 for a free one (default: none).", bounds="0..65535"
    )
    log_format: str | None = _server(
        one_of("text", "json"), "Lines on stderr: text, or a JSON object each (default text)."
    )
    otlp_traces_endpoint: str | None = _server(
        TEXT, "Collector of OpenTelemetry traces, http://HOST:4317; needs gemray[tracing] (default: none)."
    )
    max_live_requests: int | None = _server(
        INTEGER, "Running and queued requests; more are refused (default 256).", bounds=">= 1"
    )
    max_message_bytes: int | None = _server(SIZE, "Largest message either way (default 16MiB).", bounds=">= 64KiB")
    drain_deadline_s: float | None = _server(
        SECONDS, "Deadline for live requests at shutdown (default 30).", bounds=">= 0"
    )
    drain_notice_s: float | None = _server(
        SECONDS, "How long health is NOT_SERVING before connections are told to go away (default 1).", bounds=">= 0"
    )
    max_connection_age_s: float | None = _server(
        SECONDS, "Age at which a connection is told to go away; its streams go on (default: none).", bounds="> 0"
    )
    write_deadline_s: float | None = _server(SECONDS, "Longest time a stream may go unread (default 30).", bounds="> 0")
    tls_cert_file: str | None = _server(PATH, "Certificate chain, PEM; read again when it changes, as are those below.")
    tls_key_file: str | None = _server(PATH, "Private key of the certificate, PEM.")
    tls_client_ca_file: str | None = _server(PATH, "Clients must show a certificate of this authority (mTLS).")
    auth_token_file: str | None = _server(PATH, "Clients must send one of these bearer tokens, one a line.")

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that was set came from."""

    @classmethod
    def load(cls, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> ServeSettings:
        """Merge the sources; `flags` holds the texts as typed. Raises InvalidField."""
        settings = settings_of(cls)
        sources = [from_flags(flags), from_environment(environment, settings)]
        config = next((texts[CONFIG] for texts in sources if CONFIG in texts), None)
        if config is not None:
            sources.append(from_file(*config, settings))
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for setting in settings:
            found = next((texts[setting.name] for texts in sources if setting.name in texts), None)
            if found is not None:
                text, origins[setting.name] = found
                values[setting.name] = parse(setting, text, origins[setting.name])
            elif setting.default is MISSING:
                raise MissingSetting(setting.name)
        return cls(**values, origins=origins)

    @property
    def num_ranks(self) -> int:
        """Processes of the gang: the target's ranks, and the drafter's if it has one of its own.

        Raises InvalidSetting where `tp` is no number of ranks: before anything counts CPUs with it.
        """
        if self.tp < 1:
            raise InvalidSetting("tp", self.tp, "an integer >= 1", self.origins.get("tp", "the default"))
        return self.tp + (self.drafter_placement == "dedicated")

    @property
    def has_drafters_here(self) -> bool:
        """Whether every drafter, if any, can be read from this machine.

        Raises InvalidSetting for one that is not here where Ray is started here, so that no other node can have it.
        """
        absent = [drafter for drafter in self.drafter if not Path(drafter).is_dir()]
        if absent and self.address is None:
            allowed = f"there is no such directory; {MODEL.allowed}"
            raise InvalidSetting("drafter", absent[0], allowed, self.origins.get("drafter", "the default"))
        return not absent

    def server_config(self) -> ServerConfig:
        """Settings of the gRPC server; raises InvalidSetting."""
        with self._naming_origins({}):
            return self._build(ServerConfig)

    def cluster_config(self) -> ClusterConfig:
        """Settings of the gang's life; raises InvalidSetting."""
        with self._naming_origins({}):
            return self._build(ClusterConfig)

    def replica_limits(self) -> ReplicaLimits:
        """How many gangs there are; raises InvalidSetting."""
        with self._naming_origins({}):
            return self._build(ReplicaLimits)

    def engine_config(self, device: DeviceName) -> EngineConfig:
        """Settings that every rank shares, with what `auto` means on `device`; raises InvalidSetting."""
        from gemray_workers.config import EngineConfig

        with self._naming_origins(ENGINE_NAMES):
            if not self.drafter and self.draft_tokens not in (AUTO, 0):
                raise InvalidField("draft_tokens", self.draft_tokens, "0 or auto, as there is no drafter")
            if self.gpu_memory_utilization is not None and self.kv_memory != AUTO:
                raise InvalidField(
                    "gpu_memory_utilization", self.gpu_memory_utilization, "unset, as kv_memory states a size"
                )
            return self._build(
                EngineConfig,
                model_path=self.model,
                tensor_parallel_size=self.tp,
                device=device,
                dtype=DEFAULT_DTYPE[device] if self.dtype == "auto" else self.dtype,
                kv_memory_bytes=None if isinstance(self.kv_memory, str) else self.kv_memory,
                drafter_path=next(iter(self.drafter), None),
                second_drafter_path=next(iter(self.drafter[1:]), None),
                num_draft_tokens=None if isinstance(self.draft_tokens, str) else self.draft_tokens,
                adapt_draft_tokens=self.draft_tokens == AUTO,
            )

    def blueprint(self, device: DeviceName) -> Blueprint:
        """What the gang will be on `device`; raises InvalidSetting, CheckpointError, CapacityError."""
        from gemray_workers.rank.blueprint import Blueprint

        config = self.engine_config(device)
        with self._naming_origins(ENGINE_NAMES):
            return Blueprint.of(config)

    def refuse_unfit(self) -> None:
        """Raise what `blueprint` raises alike on every device, where it is not known yet which one it will be."""
        devices: tuple[DeviceName, ...] = ("cpu", "cuda")
        refusals: list[GemrayError] = []
        for each in devices:
            try:
                self.blueprint(each)
            except GemrayError as error:
                refusals.append(error)
        if len(refusals) == len(devices) and len({str(error) for error in refusals}) == 1:
            raise refusals[0]

    def _build(self, config: Callable[..., T], **fixed: Any) -> T:
        """A component's settings: those of the same name that are set, and `fixed`."""
        names = {f.name for f in fields(config)} - fixed.keys()  # type: ignore[arg-type]
        own = {f.name for f in settings_of(type(self))}
        same = {name: getattr(self, name) for name in sorted(names & own)}
        return config(**{name: value for name, value in same.items() if value is not None}, **fixed)

    @contextmanager
    def _naming_origins(self, renamed: Mapping[str, str]) -> Iterator[None]:
        """Errors of a component, in the names that the user knows."""
        try:
            yield
        except InvalidField as error:
            name = renamed.get(error.field, error.field)
            if name not in {setting.name for setting in settings_of(type(self))}:
                raise  # of a file that a setting names
            raise InvalidSetting(name, error.value, error.allowed, self.origins.get(name, "the default")) from error


def settings_of(cls: type[ServeSettings]) -> list[Field[Any]]:
    """The fields that users set."""
    return [f for f in fields(cls) if "kind" in f.metadata]
