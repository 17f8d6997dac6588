"""The settings of the api process; the engine's are in engine/config.py. Both have flags, KTSERVE_* variables and
YAML keys of the same names."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import option


@dataclass
class ServeConfig:
    # ---- server
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", group="Server")
    port: str = option("auto", "port; auto: 8000, or a free one if that is taken", group="Server")
    drain_timeout_s: float = option(30.0, "after SIGTERM, seconds for running requests to end", group="Server")
    request_timeout_s: float | None = option(None, "seconds after which a request is cancelled", group="Server")
    max_body_bytes: int = option(16 * 2**20, "largest request body", group="Server")
    max_restarts: int = option(3, "times a dead engine is started again", group="Server")
    engine_command: str | None = option(
        None, "command that runs the engine, e.g. 'numactl -N0 python -m engine.main'", group="Server"
    )
    access_log: bool = option(False, "log every HTTP request", group="Server")
    log_level: str = option("info", "least severe message to log", group="Server", choices=("debug", "info", "warning"))

    # ---- access
    api_key: list[str] = option(  # noqa: RUF009 - it makes a field
        (),
        "KEY or KEY=TENANT[:WEIGHT[:MODEL,MODEL...]]; may be repeated; none: no key is asked",
        group="Access",
        many=True,
    )
    admin_key: str | None = option(None, "key for loading and unloading adapters; none: both are off", group="Access")

    # ---- text
    tokenizer: str | None = option(None, "folder with the tokenizer, if not the model's", group="Text")
    skip_tokenizer: bool = option(False, "no tokenizer: prompts and answers are token ids", group="Text")
    chat_template: str | None = option(None, "file with a chat template, instead of the model's", group="Text")
    generation_config: str = option(
        "auto", "folder with the generation_config.json for sampling defaults; auto: the model's; none", group="Text"
    )
    default_max_tokens: int | None = option(
        None,
        "max_tokens of requests that name none; default: the rest of the context, in /v1/completions 16",
        group="Text",
        aliases=("max_new_tokens",),
    )
