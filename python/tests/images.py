"""A registry of one image, for tests."""

from __future__ import annotations

import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_OCI = "application/vnd.oci.image."


@dataclass
class Images:
    """Where the registry is, and what it has: answers by path, and the paths that were asked for."""

    host: str
    answers: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def push(self, repository: str, tag: str, layer: bytes, env: list[str]) -> str:
        """Add an image of one layer, a tar, and return the digest of its manifest."""
        arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
        config = {"os": "linux", "architecture": arch, "config": {"Env": env}}
        config["rootfs"] = {"type": "layers", "diff_ids": [_digest(layer)]}
        parts = [(f"{_OCI}config.v1+json", json.dumps(config).encode()), (f"{_OCI}layer.v1.tar", layer)]
        for _, blob in parts:
            self.answers[f"/v2/{repository}/blobs/{_digest(blob)}"] = ("application/octet-stream", blob)
        described = [{"mediaType": kind, "digest": _digest(b), "size": len(b)} for kind, b in parts]
        kind = f"{_OCI}manifest.v1+json"
        manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": kind, "config": described[0], "layers": described[1:]}
        ).encode()
        for name in (tag, _digest(manifest)):
            self.answers[f"/v2/{repository}/manifests/{name}"] = (kind, manifest)
        return _digest(manifest)


def _digest(b: bytes) -> str:
    return "sha256:" + hashlib.sha256(b).hexdigest()


@contextmanager
def serve() -> Iterator[Images]:
    """Run the registry in a thread, on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            images.asked.append(self.path)
            found = images.answers.get(self.path, ("", b"{}"))
            self.send_response(200 if self.path == "/v2/" or found[0] else 404)
            self.send_header("Content-Type", found[0])
            self.send_header("Content-Length", str(len(found[1])))
            self.end_headers()
            self.wfile.write(found[1])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    images = Images(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield images
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
