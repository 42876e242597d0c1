"""`trivium serve`: models over HTTP. The server is a package of its own, imported only here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from trivium.cli.parser import UsageError, add_model, load_options, number


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium serve`. Each is a setting of the file, too, and those after the model's also a variable."""
    parser.epilog = (
        "Every flag is also a setting of --config FILE (YAML), and those that don't decide what is computed are also a variable "
        "TRIVIUM_FLAG. A flag goes before a variable, and that before the file."
    )
    add_model(parser, several=True)
    _add_more_loading(parser)
    closed = frozenset(flag.dest for flag in parser._actions)
    _add_serving(parser)
    flags = [flag for flag in parser._actions if flag.dest != "help"]
    parser.set_defaults(flags=flags, defaults={flag.dest: flag.default for flag in flags}, closed=closed)
    for flag in flags:
        flag.default, flag.required = argparse.SUPPRESS, False  # what was not given is not there, and can come from elsewhere


def _add_more_loading(parser: argparse.ArgumentParser) -> None:
    """What a server sets beyond add_model()."""
    group = parser.add_argument_group("loading for a server")
    group.add_argument("--kv-cache-dtype", default="auto", metavar="FORMAT", help="of the KV cache (default: what loses nothing)")
    caching = argparse.BooleanOptionalAction
    group.add_argument("--enable-prefix-caching", action=caching, default=None, help="pages are shared between requests (default)")
    group.add_argument("--seed", type=number(int, 0), metavar="N", help="of requests without one: they repeat from run to run")
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        group.add_argument(flag, default="auto", metavar="NAME", help="see docs/chat.md; none: not at all (default: auto)")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML with any of these flags")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1; 0.0.0.0: everywhere)")
    group.add_argument("--port", type=number(int, 0, 65535), default=8000, metavar="N", help="0: any that is free (default: 8000)")
    group.add_argument("--served-model-name", action="append", metavar="NAME", help="name of the first model, and more names of it")
    key = "a key that clients must send, or sha256:HEX of it; may be repeated"
    group.add_argument("--api-key", action="append", metavar="KEY", help=key)
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line, with its name, scopes and limits")
    group.add_argument("--allowed-origins", action="append", metavar="URL", help="web pages that may call the server; *: all")
    group.add_argument(
        "--request-timeout", type=number(float, 0.001), metavar="S", help="until an answer is ended, waiting included"
    )
    group.add_argument("--shutdown-timeout", type=number(float, 0), default=30.0, metavar="S", help="for what runs at SIGTERM (30)")
    queued, waiting = ("--max-waiting-requests", "--max-num-queued-reqs"), ("--max-waiting-tokens", "--max-num-queued-tokens")
    group.add_argument(*queued, type=number(int, 1), default=1024, metavar="N", help="then 429 (default: 1024)")
    group.add_argument(*waiting, type=number(int, 1), metavar="N", help="prompt tokens that may wait, then 429")
    group.add_argument("--kv-host-bytes", type=number(int, 0), default=0, metavar="N", help="memory for evicted pages (default: 0)")
    group.add_argument("--kv-disk-path", type=Path, metavar="FOLDER", help="for those that don't fit there, kept over restarts")
    group.add_argument("--kv-disk-bytes", type=number(int, 1), default=10 << 30, metavar="N", help="of them (default: 10 GiB)")
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate chain in PEM: speak HTTPS")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key (default: in the same file)")
    idle = "unload a model that nobody has asked for so long; the next request loads it again (default: never)"
    group.add_argument("--idle-seconds", type=number(float, 0), metavar="S", help=idle)
    most = "models that are loaded at a time; the one that was used least recently makes room (default: all)"
    group.add_argument("--max-loaded-models", type=number(int, 1), metavar="N", help=most)
    split = "one name for several of the models, each with its percentage of the calls: chat=v1:90,v2:10; may be repeated"
    group.add_argument("--split", action="append", metavar="NAME=MODEL:WEIGHT,...", help=split)
    group.add_argument("--key-metrics", action="store_true", help="/metrics counts requests and tokens by name of the key")
    group.add_argument("--max-body", type=number(int, 1), default=32 << 20, metavar="BYTES", help="largest body (default: 32 MiB)")
    pixels = "of all images of a prompt together (default: 64 million)"
    group.add_argument("--max-image-pixels", type=number(int, 1), default=64_000_000, metavar="N", help=pixels)
    group.add_argument("--batch-dir", type=Path, metavar="FOLDER", help="keeps files and batches here (default: there are none)")
    group.add_argument("--batch-parallel", type=number(int, 1), default=32, metavar="N", help="requests of batches at a time (32)")
    group.add_argument("--max-upload", type=number(int, 1), default=200 << 20, metavar="BYTES", help="largest file (200 MiB)")
    group.add_argument(
        "--batch-storage", type=number(int, 1), default=10 << 30, metavar="BYTES", help="of all files of a key (10 GiB)"
    )
    group.add_argument("--moderation", action="append", metavar="NAME", help="a plugin that judges requests and answers")
    group.add_argument("--request-metrics", action="store_true", help="every answer tells its times")
    group.add_argument("--otlp-endpoint", metavar="URL", help="sends traces by OTLP over HTTP (needs trivium[otel])")
    group.add_argument("--vllm-metrics", action="store_true", help="/metrics has each name also with vllm: in place of trivium:")


def serve(args: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    try:
        from trivium_server import Models, Settings
        from trivium_server.config import ConfigError, settled
        from trivium_server.run import check_certificate, check_tracing, listen, slots
        from trivium_server.run import serve as answer
        from trivium_server.splits import Split
    except ImportError as error:
        raise UsageError(
            f"trivium serve: {error.name} is missing; install the server with pip install 'trivium[server]'"
        ) from error
    flags, defaults, closed = args.flags, args.defaults, args.closed
    try:
        args = argparse.Namespace(**settled(flags, defaults, vars(args), os.environ, closed))
    except ConfigError as error:
        raise UsageError(f"trivium serve: {error}") from error
    if not args.model:
        raise UsageError("trivium serve: name a MODEL, here or as model: in --config FILE")
    settings = Settings(
        keys=_keys(args), origins=tuple(args.allowed_origins or ()), max_body=args.max_body, max_image_pixels=args.max_image_pixels,
        request_timeout=args.request_timeout, shutdown_timeout=args.shutdown_timeout, timings=args.request_metrics,
        vllm_metrics=args.vllm_metrics, otlp_endpoint=args.otlp_endpoint, batch_dir=args.batch_dir,
        batch_parallel=args.batch_parallel, max_upload=args.max_upload, batch_storage=args.batch_storage,
        moderation=tuple(args.moderation or ()), certificate=args.ssl_certfile, private_key=args.ssl_keyfile,
        idle_seconds=args.idle_seconds, max_loaded_models=args.max_loaded_models, key_metrics=args.key_metrics,
        splits=Split.parse_all(args.split or ()),
    )  # fmt: skip
    names, models = args.served_model_name or [], [_named(text) for text in args.model]
    models[0] = (names[0] if names else models[0][0], models[0][1])
    twice = [name for name, _ in models if [n for n, _ in models].count(name) > 1]
    if twice:
        raise UsageError(f"trivium serve: two models are called {twice[0]}; give one another name: NAME=MODEL")
    loading = slots(models, {**load_options(args), **_engine_options(args)})
    served = Models(
        loading, [(alias, models[0][0]) for alias in names[1:]], settings.splits, idle_seconds=settings.idle_seconds,
        max_loaded=settings.max_loaded_models, max_waiting=args.max_waiting_requests,
    )  # fmt: skip
    try:
        check_certificate(settings)
    except (OSError, ValueError) as error:
        raise UsageError(f"trivium serve: the certificate can't be used: {error}") from error
    try:
        check_tracing(settings)
    except ValueError as error:
        raise UsageError(f"trivium serve: --otlp-endpoint: {error}") from error
    try:
        if args.batch_dir is not None:
            args.batch_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"trivium serve: --batch-dir {args.batch_dir}: {error.strerror or error}") from error
    try:
        sock = listen(args.host, args.port)
    except OSError as error:
        raise UsageError(f"trivium serve: can't listen at {args.host} port {args.port}: {error.strerror or error}") from error
    with sock:
        return answer(served, settings, sock)


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of AsyncLLM beyond load_options()."""
    names = (
        "enable_prefix_caching", "kv_host_bytes", "kv_disk_path", "kv_disk_bytes", "seed", "max_waiting_requests",
        "max_waiting_tokens",
    )  # fmt: skip
    parsers = {"tool_parser": args.tool_call_parser, "reasoning_parser": args.reasoning_parser}
    chosen = {name: None if parser == "none" else parser for name, parser in parsers.items()}
    return {**{name: getattr(args, name) for name in names}, "kv_dtype": args.kv_cache_dtype, **chosen}


def _named(text: str) -> tuple[str, str]:
    """(name, model) of MODEL or NAME=MODEL; a path is known by its last part."""
    name, found, model = text.partition("=")
    if found and name and model and "/" not in name:
        return name, model
    return text.rstrip("/").rpartition("/")[2] or text, text


def _keys(args: argparse.Namespace) -> Any:
    """All keys that were given, hashed."""
    from trivium_server.keys import Key, Keys, read_keys

    texts = list(args.api_key or ())
    try:
        keys = list(map(Key.of, texts))
        if args.api_key_file is not None:
            keys += (found := read_keys(args.api_key_file.read_text()))
            if not found:
                raise ValueError("it has no key")
        return Keys(keys)
    except (ValueError, OSError) as error:
        raise UsageError(f"trivium serve: {error}") from error
