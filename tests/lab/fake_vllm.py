"""A folder that looks like one that holds vLLM: its server answers at once, and knows prompts again as a cache does."""

from __future__ import annotations

from pathlib import Path

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

serve, model, *flags = sys.argv[1:]
given = dict(argument.removeprefix("--").partition("=")[::2] for argument in flags)
seen = []


def cached(prompt):
    def agree(other):
        return next((i for i, (a, b) in enumerate(zip(prompt, other)) if a != b), min(len(prompt), len(other)))

    return min(max(map(agree, seen), default=0), len(prompt) - 1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        models = {"data": [{"id": given["served-model-name"], "owned_by": "vllm"}]}
        self.answer("application/json", json.dumps({} if self.path == "/health" else models))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, number = asked["prompt"], asked["max_tokens"]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": number,
            "prompt_tokens_details": {"cached_tokens": cached(prompt)},
        }
        seen.append(prompt)
        parts = [{"choices": [{"text": " t7", "finish_reason": None}]} for _ in range(number)]
        parts[-1]["choices"][0]["finish_reason"] = "length"
        events = [*map(json.dumps, parts), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        self.answer("text/event-stream", "".join(f"data: {event}\\n\\n" for event in events))

    def answer(self, kind, text):
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(given["port"])), Handler).serve_forever()
"""
BROKEN = "raise ImportError('no kernels for this GPU')\n"


def make_site(folder: Path, server: str = SERVER) -> Path:
    """The folder, and in it a package whose command line is this text."""
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").write_text("")
    (package / "main.py").write_text(server)
    return folder


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder
