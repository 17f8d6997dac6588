"""The settings of the api process; the engine's are in engine/config.py. Both have flags, KTSERVE_* variables and
YAML keys of the same names."""

from __future__ import annotations

from dataclasses import dataclass

from api.text.calls.formats import FORMAT_NAMES
from ktserve.settings import option


@dataclass
class ServeConfig:
    """The api's settings; EngineConfig has the engine's. A flag, a variable and a line of --config for each."""

    # ---- server
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", group="Server")
    port: str = option("auto", "port; auto: 8000, or a free one if that is taken", group="Server")
    drain_timeout_s: float = option(
        30.0, "after SIGTERM, seconds for running requests to end", group="Server", limits=(0.0, 86_400.0)
    )
    request_timeout_s: float | None = option(
        None, "seconds after which a request is cancelled", group="Server", limits=(0.001, 86_400.0)
    )
    max_body_bytes: int = option(16 * 2**20, "largest request body", group="Server", limits=(1, 1 << 31))
    engine_hang_s: float = option(
        120.0,
        "seconds without a sign of life, or at one step, after which the engine is killed and restarted; 0: never",
        group="Server",
        limits=(0.0, 86_400.0),
    )
    max_restarts: int | None = option(
        None,
        "restarts of the engine in a row, without service between them, after which its next death ends the server "
        "with status 1; default: it is restarted, after growing delays, as often as it takes",
        group="Server",
        limits=(0, 1_000_000),
    )
    body_timeout_s: float = option(
        60.0, "seconds within which a request's body must come", group="Server", limits=(0.1, 86_400.0)
    )
    header_timeout_s: float = option(
        10.0, "seconds within which a request's header must come", group="Server", limits=(0.1, 86_400.0)
    )
    send_timeout_s: float = option(
        60.0, "seconds within which a client must take what is sent", group="Server", limits=(0.1, 86_400.0)
    )
    max_connections: int | None = option(
        None,
        "open connections; default: what the limit of open files leaves, at most 8192",
        group="Server",
        limits=(1, 1_000_000),
    )
    max_connections_per_address: int | None = option(
        None,
        "open connections of one client address; default: half of --max-connections",
        group="Server",
        limits=(1, 1_000_000),
    )
    prompt_cpu_limit_s: float = option(
        10.0,
        "CPU seconds that parsing, rendering and tokenising one request may take",
        group="Server",
        limits=(0.1, 86_400.0),
    )
    engine_command: str | None = option(
        None, "command that runs the engine, e.g. 'numactl -N0 python -m ktserve engine'", group="Server"
    )
    unknown_fields: str = option(
        "warn",
        "fields of a request that nobody knows: warn answers with a header and logs each name once; reject answers 400",
        group="Server",
        choices=("ignore", "warn", "reject"),
    )
    cors_origins: list[str] = option(  # noqa: RUF009 - it makes a field
        (),
        "origins whose pages may call the server, such as https://example.com; * for all; may be repeated",
        group="Server",
        many=True,
    )
    root_path: str = option(
        "",
        "prefix of the paths under which a proxy publishes the server, such as /llm; it may leave it in or out",
        group="Server",
    )
    access_log: bool = option(False, "log every HTTP request", group="Server")
    log_format: str = option(
        "text", "text, or one JSON object a line, with the request's id", group="Server", choices=("text", "json")
    )
    usage_log: str | None = option(
        None, "file for one JSON line for each ended answer, opened again on SIGHUP", group="Server"
    )
    otlp_endpoint: str | None = option(
        None, "URL that takes OpenTelemetry traces over HTTP, e.g. http://localhost:4318/v1/traces", group="Server"
    )
    log_level: str = option("info", "least severe message to log", group="Server", choices=("debug", "info", "warning"))

    # ---- batches
    data_dir: str | None = option(
        None, "folder for files and batches (/v1/files, /v1/batches); default: they are off", group="Batches"
    )
    max_file_bytes: int = option(512 * 2**20, "largest uploaded file", group="Batches", limits=(1, 1 << 40))
    max_files: int = option(1000, "files that a tenant may have", group="Batches", limits=(1, 1 << 31))
    max_stored_bytes: int = option(
        16 * 2**30, "bytes of files at which a tenant must delete some to go on", group="Batches", limits=(1, 1 << 50)
    )
    max_batch_lines: int = option(1_000_000, "requests in a batch", group="Batches", limits=(1, 1 << 31))
    max_open_batches: int = option(
        100, "batches of a tenant that have not ended", group="Batches", limits=(1, 1_000_000)
    )
    batch_concurrency: int | None = option(
        None, "requests of batches in flight; default: --max-num-seqs", group="Batches", limits=(1, 4096)
    )

    # ---- access
    api_key: list[str] = option(  # noqa: RUF009 - it makes a field
        (),
        "KEY or KEY=TENANT[:WEIGHT[:MODEL,MODEL...]]; may be repeated; none: no key is asked. Others can read it in "
        "the list of processes: use --api-keys-file or KTSERVE_API_KEY",
        group="Access",
        many=True,
    )
    api_keys_file: str | None = option(
        None, "file with such keys, one a line; lines that begin with # are comments", group="Access"
    )
    admin_key: str | None = option(
        None,
        "key for loading and unloading adapters, and for /metrics if there are API keys; none: they are off. "
        "Others can read it in the list of processes: use --admin-key-file or KTSERVE_ADMIN_KEY",
        group="Access",
    )
    admin_key_file: str | None = option(None, "file with the admin key", group="Access")
    tenants: str | None = option(
        None,
        "YAML file with tenants: hashed keys ('ktserve keys new'), models, limits; read again on SIGHUP",
        group="Access",
    )
    open: bool = option(False, "serve without keys on an address that other machines can reach", group="Access")
    adapter_root: list[str] = option(  # noqa: RUF009 - it makes a field
        (), "folder below which adapters may be loaded at run time; may be repeated", group="Access", many=True
    )
    allow_any_adapter_path: bool = option(False, "adapters may be loaded from any folder", group="Access")

    # ---- text
    tokenizer: str | None = option(None, "folder with the tokenizer, if not the model's", group="Text")
    skip_tokenizer: bool = option(False, "no tokenizer: prompts and answers are token ids", group="Text")
    chat_template: str | None = option(None, "file with a chat template, instead of the model's", group="Text")
    tool_format: str = option(
        "auto",
        "form in which the model writes calls of tools; auto: what its chat template writes, else hermes",
        group="Text",
        choices=("auto", *FORMAT_NAMES),
    )
    reasoning_format: str = option(
        "auto",
        "think: reasoning stands in <think> tags; none: there is none; auto: what the chat template writes",
        group="Text",
        choices=("auto", "think", "none"),
    )
    trust_control_tokens: bool = option(
        False, "control tokens written out in messages become control tokens, not text", group="Text"
    )
    generation_config: str = option(
        "auto", "folder with the generation_config.json for sampling defaults; auto: the model's; none", group="Text"
    )
    default_max_tokens: int | None = option(
        None,
        "max_tokens of requests that name none; default: the rest of the context, in /v1/completions 16",
        group="Text",
        aliases=("max_new_tokens",),
        limits=(1, 1 << 24),
    )
