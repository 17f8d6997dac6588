"""What becomes of the fields of Anthropic's, OpenAI's Responses and Ollama's endpoints."""

from __future__ import annotations

from api.http.bodies.generation import SamplingFields
from api.http.fields.field import alias, no_op, refused, supported
from api.http.fields.generation import GENERATION

MESSAGES = (
    supported("model", "as everywhere"),
    supported(
        "messages",
        "text, thinking, `tool_use` and `tool_result` blocks; the answer goes on with an assistant's text at the end",
    ),
    supported("max_tokens", "default: the rest of the context"),
    supported("system", "a text or text blocks"),
    supported("stop_sequences", "see `stop`"),
    supported("stream", "Anthropic's events"),
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("top_k", "0 or -1: off"),
    supported("tools", "a client's own"),
    supported("tool_choice", "`auto`, `any`, `tool` or `none`"),
    supported("thinking", "its fields are below"),
    supported("output_config", "its fields are below"),
    supported("output_format", "the older place of `output_config.format`"),
    no_op("metadata", "tenants are told by their keys"),
    no_op("service_tier", "there is one tier"),
    no_op("cache_control", "the prefix cache finds equal prompts by itself"),
    no_op("context_management", "the client's messages are taken as they are"),
    no_op("diagnostics", "nothing is kept with an answer"),
    no_op("inference_geo", "there is one place"),
    no_op("speed", "there is one speed"),
    no_op("user_profile_id", "tenants are told by their keys"),
    no_op("workspace_id", "tenants are told by their keys"),
    refused("mcp_servers", "only a client's own tools are called", []),
    refused("container", "nothing is run here"),
)

THINKING = (
    supported("type", "`enabled` and `adaptive` switch reasoning on, `disabled` off, if the template can"),
    supported("budget_tokens", "with `enabled`: after so many tokens of reasoning its end is forced"),
    supported("display", "`omitted`: reasoning is left out of the answer; it is never summarized"),
)

OUTPUT_CONFIG = (
    supported("effort", "see `reasoning_effort`; `thinking` decides whether there is reasoning"),
    supported("format", "its fields are below"),
)

FORMAT = (
    supported("type", "`json_schema`; `json_object`: any object; `text`: anything"),
    supported("schema", "what the output follows"),
    no_op("name", "the schema says all"),
    no_op("description", "the schema says all"),
    no_op("strict", "a schema always holds"),
)

RESPONSES = (
    supported("model", "as everywhere"),
    supported("input", "a text, or items: messages, calls of functions, their outputs, reasoning"),
    supported("instructions", "the first message, of this response alone"),
    supported("previous_response_id", "its messages come before the input; it must have been stored"),
    supported("store", "kept for `previous_response_id` and `GET`, as long as the bounded store has room"),
    supported("stream", "events with sequence numbers"),
    supported("max_output_tokens", "default: the rest of the context"),
    supported("top_logprobs", "that many alternatives for each token of the output's text"),
    supported("include", "`message.output_text.logprobs`: log-probabilities; reasoning is given as it is"),
    supported("tools", "functions"),
    supported("tool_choice", "`auto`, `none`, `required` or a function"),
    supported("parallel_tool_calls", "false: one call at most"),
    supported("structured_outputs", "vLLM's: see above; not with `text.format`"),
    supported("chat_template_kwargs", "variables for the template"),
    *(field for field in GENERATION if field.name in SamplingFields.model_fields),
    supported("text", "its fields are below"),
    supported("reasoning", "its fields are below"),
    supported("metadata", "comes back with the response"),
    no_op("user", "tenants are told by their keys"),
    no_op("service_tier", "there is one tier"),
    no_op("safety_identifier", "tenants are told by their keys"),
    no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
    no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
    no_op("prompt_cache_options", "the prefix cache finds equal prompts by itself"),
    no_op("stream_options", "nothing is padded"),
    refused("context_management", "an input that does not fit is a 400", []),
    refused("moderation", "there is no moderation"),
    refused("image", "the model writes text only"),
    refused("truncation", "an input that does not fit is a 400", "disabled"),
    refused("background", "a response is made while its client waits", False),
    refused("conversation", "use `previous_response_id`"),
    refused("prompt", "there are no stored prompts"),
    refused("max_tool_calls", "a client calls its tools itself"),
)

REASONING = (
    supported("effort", "see `reasoning_effort`"),
    no_op("summary", "reasoning is given as it is"),
    no_op("generate_summary", "reasoning is given as it is"),
    no_op("context", "the reasoning of earlier answers is what the template keeps of it"),
    no_op("mode", "there is one"),
)

TEXT_FORMAT = (
    supported("type", "`json_schema`; `json_object`: any object; `text`: anything"),
    supported("schema", "what the output follows"),
    supported("name", "comes back with the response"),
    supported("description", "comes back with the response"),
    supported("strict", "comes back with the response; a schema always holds"),
)

TEXT = (
    supported("format", "its fields are below"),
    no_op("verbosity", "no template has such a control"),
)

OLLAMA = (
    supported("model", "as everywhere; `:latest` at its end is left out"),
    supported("stream", "true unless given: a line of JSON each"),
    supported("format", '`"json"` or a JSON schema'),
    supported("think", "true or false: see `enable_thinking`; a text: see `reasoning_effort`"),
    supported("options", "its fields are below"),
    no_op("keep_alive", "the model stays"),
    refused("logprobs", "/v1/chat/completions gives log-probabilities", False),
    refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
)
OLLAMA_CHAT = (
    supported("messages", "without images; the answer goes on with an assistant's text at the end"),
    supported("tools", "functions"),
)
OLLAMA_GENERATE = (
    supported("prompt", "a user's message, or the whole prompt if `raw`"),
    supported("system", "the first message"),
    supported("raw", "no chat template"),
    refused("images", "the model reads text only", []),
    refused("width", "the model writes text only"),
    refused("height", "the model writes text only"),
    refused("steps", "the model writes text only"),
    refused("suffix", "the model does not fill in the middle", ""),
    refused("template", "the server's template is used (`--chat-template`)", ""),
    refused("context", "send the messages to /api/chat", []),
)
OLLAMA_OPTIONS = (
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("top_k", "0 or -1: off"),
    supported("min_p", "0: off"),
    supported("seed", "see above"),
    supported("num_predict", "most tokens of output; below 0: what fits"),
    supported("stop", "a text or a list"),
    supported("repeat_penalty", "see `repetition_penalty`"),
    supported("presence_penalty", "see above"),
    supported("frequency_penalty", "see above"),
    no_op("num_ctx", "the context is the server's"),
    no_op("num_batch", "batches are the server's"),
    no_op("num_gpu", "placement is the server's"),
    no_op("num_thread", "threads are the server's"),
    no_op("main_gpu", "placement is the server's"),
    no_op("use_mmap", "memory is the server's"),
    no_op("numa", "memory is the server's"),
    no_op("num_keep", "the context is not shifted"),
    no_op("low_vram", "memory is the server's"),
    no_op("f16_kv", "memory is the server's"),
    no_op("use_mlock", "memory is the server's"),
    no_op("logits_all", "there is no such answer"),
    no_op("vocab_only", "there is no such answer", False),
    no_op("embedding_only", "there is no such answer", False),
    no_op("mirostat_tau", "there is no such sampler to set"),
    no_op("mirostat_eta", "there is no such sampler to set"),
    refused("typical_p", "no such filter", 1.0),
    refused("repeat_last_n", "penalties look at all tokens", -1),
    refused("mirostat", "no such sampler", 0),
    refused("tfs_z", "no such filter", 1.0),
    refused("penalize_newline", "penalties look at all tokens", True),
)

OLLAMA_SHOW = (
    supported("model", "as everywhere"),
    alias("name", "model"),
    no_op("verbose", "there is no more to show"),
)
